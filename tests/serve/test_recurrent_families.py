"""Layers with a state through the engine: slots, snapshots, chunks and preemption change no token."""

import msgspec
import pytest
import torch
from tiny_checkpoints import RECURRENT_NAMES
from tiny_engines import at_rest, greedy, model, prompt_of, submit, tiny_engine

from cairn.core.errors import CairnError, ConfigError
from cairn.kernels.delta.rule import (
    CHUNK,
    delta_chunk_reference,
    delta_step_reference,
    unit_length,
)
from cairn.models.cache import cache_groups, state_bytes
from cairn.models.presets import preset
from cairn.models.recurrence import recur
from cairn.serve.separation.prefill import hold_pages

SWITCHES = {
    "plain": {"plain": True},
    "chunked-tight": {"chunked": True, "tight": True},
    "overlap": {"overlap": True},
    "invariant": {"invariant": True},
}


@pytest.mark.parametrize("family", RECURRENT_NAMES)
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_the_engine_answers_as_the_contiguous_reference(family, switches):
    shared = prompt_of(34, 1)  # its snapshot lies behind two full pages
    prompts = [shared, [*shared, 5, 6], prompt_of(3, 2), prompt_of(32, 4), shared]
    engine = tiny_engine(family, **switches)
    for again in (prompts, prompts[:4]):
        requests = submit(engine, again)
        engine.run()
        assert [r.outputs for r in requests] == [greedy(family, prompt) for prompt in again]
    assert [r.cached for r in requests[:1]] == [32]
    assert (
        requests[3].cached == 16
    )  # of a prompt of two pages, all but the page with its last token
    if "tight" in switches:
        assert engine.scheduler.queues.preemptions
    at_rest(engine)


def test_few_slots_let_few_requests_run_and_lose_no_token():
    engine = tiny_engine("lfm2", rows=1)
    assert engine.scheduler.limits.states == 3
    prompts = [prompt_of(20 + i, i) for i in range(5)]
    requests = submit(engine, [*prompts, *prompts])
    engine.run()
    assert [r.outputs for r in requests] == [greedy("lfm2", prompt) for prompt in prompts] * 2
    at_rest(engine)


def test_sixty_four_tokens_are_those_of_the_reference():
    prompt = prompt_of(40, 7)
    engine = tiny_engine("qwen3_next")
    (request,) = submit(engine, [prompt], max_tokens=64, ignore_eos=True)
    engine.run()
    assert request.outputs == greedy("qwen3_next", prompt, 64)


def test_what_a_state_cannot_do_is_refused_with_a_reason():
    with pytest.raises(CairnError, match="keep a state"):
        tiny_engine("lfm2", speculate="ngram", draft_tokens=2)
    with pytest.raises(ConfigError, match="not sent between servers"):
        hold_pages(tiny_engine("lfm2"))
    mixer = model("lfm2").layers[0].attention
    with pytest.raises(ConfigError, match="object carries no state along a sequence"):
        recur(object(), mixer, ())


def test_a_state_is_counted_once_and_not_by_tokens():
    spec = model("qwen3_next").spec
    full, state = cache_groups(spec)
    assert (full.kind, full.layers, state.kind, state.layers) == ("full", (1, 3), "state", (0, 2))
    recurrent, convolution = 4 * 8 * 12 * 4, 3 * (2 * 16 + 48) * 2
    assert state_bytes((full, state), 2) == 2 * (recurrent + convolution)
    longer = msgspec.structs.replace(spec, context=2 * spec.context)
    assert state_bytes(cache_groups(longer), 2) == state_bytes((full, state), 2)


def test_chunks_of_the_delta_rule_equal_its_steps():
    torch.manual_seed(0)
    tokens, heads = 2 * CHUNK + 5, 3
    q, k = (unit_length(torch.randn(tokens, heads, 8)) for _ in "qk")
    v, beta = torch.randn(tokens, heads, 6), torch.rand(tokens, heads)
    g = -3 * torch.rand(
        tokens, heads
    )  # over a chunk far more than exp can take, with the wrong sign
    state = torch.randn(heads, 8, 6)
    found, last = delta_chunk_reference(q, k, v, g, beta, state)
    one = state[None]
    for t in range(tokens):
        y, one = delta_step_reference(*(x[t : t + 1] for x in (q, k, v, g, beta)), one)
        torch.testing.assert_close(found[t], y[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, one[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [("qwen3-next-80b-a3b", 79.7e9, 3.9e9), ("lfm2-1.2b", 1.17e9, 1.17e9)],
)
def test_shapes_have_as_many_parameters_as_their_names_say(name, parameters, active):
    spec = preset(name)
    assert spec.parameters() == pytest.approx(parameters, rel=0.005)
    assert spec.active_parameters() == pytest.approx(active, rel=0.05)
