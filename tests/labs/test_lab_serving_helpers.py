"""What the serving labs compute themselves: speculation, fair shares, fleets, latent attention, adapters."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.labs.serving import continuous_batching, fair_share, multi_lora, routing
from cairn.labs.serving._engine import ask, words
from cairn.labs.serving._fleet import Replica, serve, ttfts
from cairn.labs.serving._speculate import accepted_of, expected_tokens, keep, lookup, speculate
from cairn.labs.serving.structured_output import follows
from cairn.models.build import ModelBuild
from cairn.models.generate import GenerateSampling, Generation
from cairn.models.presets import preset
from cairn.models.weights import random_model
from cairn.serve.engine.request import Limits
from cairn.serve.simulate import Arrival, simulate

LIMITS = Limits(rows=4, step_tokens=64, context=256, pages=256, page_size=16, vocabulary=64)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return random_model(preset("tiny-llama"), ModelBuild("cpu", torch.float32)).eval()


# -- speculation -----------------------------------------------------------------------------------


def test_lookup_copies_what_followed_the_last_occurrence():
    assert lookup([1, 2, 3, 9, 1, 2, 3], most=2) == [9, 1]
    assert lookup([7, 1, 7, 2, 7], most=3) == [2, 7]  # the last time that 7 was there
    assert lookup([1, 2, 3], most=4) == []


def test_accepted_are_the_first_ones_that_agree():
    assert accepted_of([4, 5, 6], [4, 5, 9, 1]) == 2
    assert accepted_of([], [3]) == 0
    assert accepted_of([4], [4, 2]) == 1


@pytest.mark.parametrize("most", [1, 3, 6])
def test_guessing_changes_no_token(model, most):
    """The plain generator is the reference; random weights repeat themselves soon, so guesses are tried."""
    prompt = [5, 9, 5, 9, 5]
    plain = list(Generation(model, prompt, GenerateSampling(max_tokens=40), ()))
    told = speculate(model, prompt, 40, most)
    assert told.tokens == plain
    assert told.accepted <= told.guessed
    assert told.passes + told.accepted == 40  # every pass gives one token more than it accepted


def test_expected_tokens_is_the_geometric_sum():
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / 0.2)
    assert expected_tokens(1.0, 3) == 4


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_kept_tokens_have_the_targets_distribution_exactly(weights, draw):
    """Integrated over both random numbers on a fine grid, for every token that the draft may draw."""
    target_V = torch.tensor(weights, dtype=torch.float64)
    draft_V = target_V[torch.tensor(draw.sample(range(len(weights)), len(weights)))].flip(0)
    target_V, draft_V = target_V / target_V.sum(), draft_V / draft_V.sum()
    found_V = torch.zeros_like(target_V)
    grid = 40
    for token in range(len(weights)):
        kept = min(1.0, float(target_V[token] / draft_V[token]))
        found_V[token] += draft_V[token] * kept
        for place in range(grid):  # refused: chance just above what is kept, and every `again`
            if kept >= 1:
                break
            other = keep(draft_V, target_V, token, min(1.0, kept + 1e-9), (place + 0.5) / grid)
            found_V[other] += draft_V[token] * (1 - kept) / grid
    assert torch.allclose(found_V, target_V, atol=2.0 / grid)


# -- batching and fleets -------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 4))
def test_continuous_steps_are_those_of_the_scheduler(lengths, rows):
    limits = Limits(rows=rows, step_tokens=64, context=64, pages=256, page_size=16, vocabulary=64)
    trace = [Arrival(0.0, ask(n, [1], length)) for n, length in enumerate(lengths)]
    steps = simulate(trace, limits, lambda step: 1.0, prefix_caching=False).steps
    assert steps == continuous_batching.continuous_steps(lengths, rows)
    assert steps <= continuous_batching.static_steps(lengths, rows)


def drawn_trace(count, seed):
    draw, at, made = random.Random(seed), 0.0, []
    for number in range(count):
        at += draw.expovariate(20.0)
        made.append((at, ask(number, words(draw.randint(1, 40), 60, number), draw.randint(1, 12))))
    return made


def test_a_fleet_of_one_is_the_simulator():
    def seconds(step):
        return 0.004 + 1e-4 * step.tokens

    alone = simulate([Arrival(*one) for one in drawn_trace(60, 5)], LIMITS, seconds)
    made = drawn_trace(60, 5)
    serve([Replica(LIMITS, seconds)], made, lambda replicas, request, at: 0)
    assert ttfts(r for _, r in made) == pytest.approx(sorted(o.ttft or 0.0 for o in alone.outcomes))
    ends = [request.ledger.finished - request.ledger.arrived for _, request in made]
    assert ends == pytest.approx([outcome.seconds for outcome in alone.outcomes])


def test_affinity_keeps_a_conversation_and_moves_only_a_new_replicas_share():
    def limited():
        return Replica(LIMITS, lambda step: 1.0)

    four, five = [limited() for _ in range(4)], [limited() for _ in range(5)]
    requests = [ask(n, words(32, 900, n), 1) for n in range(200)]
    before = [routing.affinity(four, request, 0.0) for request in requests]
    after = [routing.affinity(five, request, 0.0) for request in requests]
    again = [routing.affinity(four, ask(999, r.prompt, 1), 9.0) for r in requests]
    assert before == again
    assert all(new in (old, 4) for old, new in zip(before, after, strict=True))
    assert 20 <= after.count(4) <= 60  # about a fifth


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=60), st.integers(1, 20))
def test_granted_tokens_never_drift_apart(tenants, prompt):
    """Whoever both waits: two requests at most lie between them."""
    counters = fair_share.Counters(fair=True)
    for number, tenant in enumerate(tenants):
        counters.push(tenant, ask(number, [1] * prompt, 1))
    most = 2 * (prompt + fair_share.OUTPUTS)
    taken = 0
    while counters.pop() is not None:
        taken += 1
        if all(counters.queues.get(name) for name in "ab"):
            assert abs(counters.served["a"] - counters.served["b"]) <= most
    assert taken == len(tenants)


def test_first_come_is_the_order_of_arrival():
    counters = fair_share.Counters(fair=False)
    for number, tenant in enumerate("aabab"):
        counters.push(tenant, ask(number, [1], 1))
    popped = [one for _ in range(5) if (one := counters.pop()) is not None]
    assert [request.id for _, request in popped] == [0, 1, 2, 3, 4]


# -- arithmetic ------------------------------------------------------------------------------------


def test_adapters_in_one_batch_are_those_of_each_row_alone():
    draw = torch.Generator().manual_seed(2)
    weight = torch.randn(12, 8, generator=draw)
    adapters = multi_lora.Adapters(
        torch.randn(3, 2, 8, generator=draw), torch.randn(3, 12, 2, generator=draw)
    )
    x, which = torch.randn(5, 8, generator=draw), torch.tensor([2, 0, 2, 1, 0])
    alone = torch.stack(
        [
            x[row] @ (weight + adapters.b_INR[i] @ adapters.a_IRK[i]).t()
            for row, i in enumerate(which.tolist())
        ]
    )
    assert torch.allclose(multi_lora.batched(x, weight, adapters, which), alone, atol=1e-5)
    assert torch.allclose(multi_lora.grouped(x, weight, adapters, which), alone, atol=1e-5)


def test_follows_accepts_the_schema_and_nothing_else():
    assert follows('{"name": "Ann", "age": 3, "kind": "cat"}')
    assert not follows('{"name": "Ann", "age": 300, "kind": "cat"}')
    assert not follows('{"name": "Ann", "age": 3}')
    assert not follows("Ann has a cat")
