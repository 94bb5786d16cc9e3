"""The plain generator: greedy as `transformers` is, sampling from the distribution it promises."""

import math

import pytest
import tiny_checkpoints
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cairn.core.errors import RequestError
from cairn.models.attend import Cached, KVCache
from cairn.models.checkpoint import open_checkpoint
from cairn.models.generate import (
    DEFAULT_MAX_TOKENS,
    GenerateSampling,
    Generation,
    budget,
    next_logits,
    probabilities,
    sample,
)
from cairn.models.presets import preset

PROMPT = [7, 77, 3, 150, 9]


@pytest.fixture(scope="module")
def model():
    return open_checkpoint(tiny_checkpoints.folder("llama")).load()


def generate(model, prompt=PROMPT, eos_ids=(), **sampling) -> tuple[list[int], str | None]:
    generation = Generation(model, prompt, GenerateSampling(**sampling), eos_ids)
    return list(generation), generation.finish


# -- greedy -------------------------------------------------------------------------------------


def test_greedy_is_what_transformers_generates(model):
    expected = tiny_checkpoints.reference("llama").generate(
        torch.tensor([PROMPT]),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert generate(model, max_tokens=40) == (expected[0, len(PROMPT) :].tolist(), "length")


def test_generation_stops_where_transformers_stops(model):
    tokens, _ = generate(model, max_tokens=20)
    eos = tokens[6]
    expected = (
        tiny_checkpoints.reference("llama")
        .generate(
            torch.tensor([PROMPT]),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=[eos, 2],
            pad_token_id=0,
        )[0, len(PROMPT) :]
        .tolist()
    )
    assert expected[-1] == eos
    assert generate(model, max_tokens=20, eos_ids=(2, eos)) == (expected[:-1], "stop")


def test_the_end_token_may_come_first(model):
    (first, *_), _ = generate(model, max_tokens=1)
    assert generate(model, eos_ids=(first,)) == ([], "stop")


def test_the_end_token_as_the_last_that_fits_is_a_stop(model):
    tokens, _ = generate(model, max_tokens=8)
    position = tokens.index(tokens[-1])
    expected = (tokens[:position], "stop")
    assert generate(model, max_tokens=position + 1, eos_ids=(tokens[-1],)) == expected


def test_without_an_end_generation_has_the_length_asked_for(model):
    for count in (1, 2, 17):
        tokens, finish = generate(model, max_tokens=count)
        assert (len(tokens), finish) == (count, "length")


def test_a_generation_that_is_not_over_has_no_reason_to_be(model):
    generation = Generation(model, PROMPT, GenerateSampling(max_tokens=3), ())
    assert generation.finish is None
    next(iter(generation))
    assert generation.finish is None


def test_a_generation_can_be_repeated(model):
    generation = Generation(
        model, PROMPT, GenerateSampling(max_tokens=5, temperature=1.0, seed=4), ()
    )
    assert list(generation) == list(generation)


def test_the_context_may_be_filled_to_the_last_position(model):
    prompt = [token % 211 for token in range(model.spec.context - 1)]
    tokens, finish = generate(model, prompt)
    assert (len(tokens), finish) == (1, "length")
    cache = KVCache(model.spec, len(prompt), torch.float32, "cpu")
    assert tokens == [int(next_logits(model, torch.tensor(prompt), cache).argmax())]


# -- sampling -----------------------------------------------------------------------------------

# A quarter apart: no two are equal, and none is equal after a division.
distinct_logits = st.lists(st.integers(-40, 40), min_size=1, max_size=30, unique=True).map(
    lambda values: torch.tensor(values) / 4
)
temperatures = st.floats(0.05, 5.0)
top_ks = st.integers(0, 40)
top_ps = st.floats(0.01, 1.0)


def warped(logits_V, temperature, top_k, top_p) -> torch.Tensor:
    steps = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))
    return steps(None, logits_V[None].clone())[0].softmax(-1)


@given(distinct_logits, temperatures, top_ks, top_ps)
def test_the_distribution_is_that_of_transformers(logits_V, temperature, top_k, top_p):
    before_cut = warped(logits_V, temperature, top_k, 1.0).sort(descending=True).values.double()
    # Where a sum of probabilities is top_p but for rounding, both answers are right.
    assume(((before_cut.cumsum(0) - top_p).abs() > 1e-5).all() or top_p == 1)
    ours = probabilities(
        logits_V, GenerateSampling(temperature=temperature, top_k=top_k, top_p=top_p)
    )
    theirs = warped(logits_V, temperature, top_k, top_p)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@given(distinct_logits, temperatures, st.integers(1, 40))
def test_top_k_keeps_the_k_most_likely(logits_V, temperature, top_k):
    weights_V = probabilities(logits_V, GenerateSampling(temperature=temperature, top_k=top_k))
    kept = set(logits_V.topk(min(top_k, len(logits_V))).indices.tolist())
    assert set(weights_V.nonzero().flatten().tolist()) <= kept
    assert weights_V.sum() == pytest.approx(1, abs=1e-5)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), temperatures, st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_that_reach_p_even_among_equals(values, temperature, top_p):
    logits_V = torch.tensor(values) / 2
    whole_V = (logits_V.double() / temperature).softmax(-1).sort(descending=True).values
    assume(((whole_V.cumsum(0) - top_p).abs() > 1e-5).all())
    weights_V = probabilities(logits_V, GenerateSampling(temperature=temperature, top_p=top_p))
    needed = int((whole_V.cumsum(0) < top_p).sum()) + 1
    assert int((weights_V > 0).sum()) == needed
    assert weights_V.sort(descending=True).values[0] == weights_V.max() > 0


@given(distinct_logits)
def test_a_temperature_near_zero_is_greedy(logits_V):
    for temperature in (1e-6, 1e-30, 1e-40, 5e-324):
        weights_V = probabilities(logits_V, GenerateSampling(temperature=temperature))
        assert weights_V[logits_V.argmax()] == 1
        assert weights_V.sum() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_distribution_is_computed_in_float32(dtype):
    weights_V = probabilities(torch.arange(300).to(dtype) / 64, GenerateSampling(temperature=1.0))
    assert weights_V.dtype == torch.float32
    assert weights_V.sum() == pytest.approx(1, abs=1e-5)


def test_draws_come_from_what_is_left_and_reach_all_of_it():
    logits_V = torch.tensor([1.0, 4.0, 3.5, -2.0, 3.0])
    sampling = GenerateSampling(temperature=1.0, top_k=3)
    generator = torch.Generator().manual_seed(0)
    assert {sample(logits_V, sampling, generator) for _ in range(200)} == {1, 2, 4}


def test_draws_follow_the_probabilities():
    """A fixed seed, so that this is no matter of luck: 4000 draws, four standard deviations."""
    logits_V = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    generator = torch.Generator().manual_seed(1)
    draws = [sample(logits_V, GenerateSampling(temperature=1.0), generator) for _ in range(4000)]
    for token, share in enumerate((0.1, 0.2, 0.3, 0.4)):
        assert draws.count(token) / 4000 == pytest.approx(share, abs=4 * (share / 4000) ** 0.5)


def test_the_same_seed_gives_the_same_tokens(model):
    runs = {
        seed: [generate(model, max_tokens=24, temperature=1.5, seed=seed)[0] for _ in range(2)]
        for seed in (0, 1, 2**63 - 1)
    }
    assert all(first == second for first, second in runs.values())
    assert len({tuple(first) for first, _ in runs.values()}) == 3


def test_without_a_seed_no_two_runs_are_alike(model):
    runs = {tuple(generate(model, max_tokens=24, temperature=3.0)[0]) for _ in range(3)}
    assert len(runs) == 3


def test_a_seed_leaves_the_global_generator_alone(model):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    generate(model, max_tokens=4, temperature=1.0, seed=9)
    assert torch.equal(torch.rand(4), expected)


def test_one_candidate_is_greedy_whatever_the_seed(model):
    greedy = generate(model, max_tokens=12)
    for choice in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}):
        assert generate(model, max_tokens=12, **{"temperature": 2.0, "seed": 1} | choice) == greedy


# -- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -1, "0 or more"),
        ("temperature", -1e-9, "0 or more"),
        ("temperature", math.nan, "0 or more"),
        ("temperature", math.inf, "0 or more"),
        ("top_k", -1, "0 (all) or more"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -5, "at least 1"),
        ("seed", -1, "between 0 and 2**63 - 1"),
        ("seed", 2**63, "between 0 and 2**63 - 1"),
    ],
)
def test_a_bad_sampling_value_is_refused_with_its_range(name, value, expected):
    with pytest.raises(RequestError) as caught:
        GenerateSampling(**{name: value})
    assert caught.value.message == f"{name} is {value}"
    assert caught.value.hint == f"it has to be {expected}"


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(RequestError, match="the prompt is empty"):
        generate(model, [])


@pytest.mark.parametrize("token", [211, 10**9, -1])
def test_a_token_outside_the_vocabulary_is_refused(model, token):
    with pytest.raises(RequestError, match=f"token {token} is outside the vocabulary of 211"):
        generate(model, [5, token, 999])


@pytest.mark.parametrize("length", [160, 161, 1000])
def test_a_prompt_that_leaves_no_room_is_refused(model, length):
    message = f"the prompt has {length} tokens, the context of the model is 160"
    with pytest.raises(RequestError, match=message):
        generate(model, [5] * length)


@given(prompt=st.integers(1, 300), max_tokens=st.none() | st.integers(1, 300))
def test_the_budget_is_what_fits_or_an_error_that_says_what_would(prompt, max_tokens):
    spec = preset("tiny-llama")  # a context of 256
    room = spec.context - prompt
    if room < 1 or (max_tokens or 1) > room:
        with pytest.raises(RequestError) as caught:
            budget(spec, [1] * prompt, max_tokens)
        if room >= 1:
            assert f"max_tokens {max_tokens} exceed the context of 256" in caught.value.message
            assert caught.value.hint == f"at most {room} tokens can follow this prompt"
    else:
        expected = max_tokens or min(DEFAULT_MAX_TOKENS, room)
        assert budget(spec, [1] * prompt, max_tokens) == expected


def test_a_step_that_does_not_fit_the_cache_is_refused_and_changes_nothing(model):
    cache = KVCache(model.spec, 6, torch.float32, "cpu")
    next_logits(model, torch.tensor(PROMPT), cache)
    message = "2 tokens do not fit behind 5 in a cache of 6"
    with pytest.raises(RequestError, match=message) as caught:
        Cached([cache], [2])
    assert caught.value.hint
    assert cache.length == 5
    next_logits(model, torch.tensor([1]), cache)
    assert cache.length == 6
