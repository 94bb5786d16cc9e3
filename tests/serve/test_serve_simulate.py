"""The simulator against arithmetic that can be done by hand, and against what has to hold for any trace."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.bench.workload import requests as workload
from cairn.core.errors import HardwareError
from cairn.hw.ceilings import Ceilings, Identity, Measured
from cairn.models.presets import preset
from cairn.models.spec import ModelSpec
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.speculate.ngram import NgramDrafter
from cairn.serve.engine.speculate.speculation import Speculation
from cairn.serve.engine.speculate.synthetic import make_synthetic, rates_of_length
from cairn.serve.engine.step import Chunk, Step
from cairn.serve.simulate import Arrival, StepCosts, roofline_step_seconds, simulate

BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12


def ceilings(
    launch: float = 0.0, bandwidth: float = BYTES_PER_S, rate: float = FLOPS_PER_S
) -> Ceilings:
    def measured(value: float, unit) -> Measured:
        return Measured(value=value, unit=unit, low=value, high=value, runs=1, how="by decree")

    return Ceilings(
        measured_at="2026-01-01T00:00:00Z",
        quick=False,
        identity=Identity(cpu=None, threads=None, gpus=["G"], driver=None, torch=None),
        device="cuda:0",
        device_name="G",
        copy=measured(bandwidth, "B/s"),
        matmul={"bf16": measured(rate, "FLOP/s")},
        launch_in_graph=measured(launch, "s"),
    )


def limits(**fields) -> Limits:
    return Limits(**{**dict(rows=256, step_tokens=16384, context=4096, pages=30_000, page_size=16, vocabulary=151_936),
                     **fields})  # fmt: skip


def make(id: int, prompt: int, output: int, **fields) -> Request:
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return Request(id, [(7919 * id + n) % 9000 for n in range(prompt)], params, **fields)


def one_second(step: Step) -> float:
    return 1.0


def requests_of(name: str) -> list[Arrival]:
    return [
        Arrival(0.0, Request(n, r.prompt, SamplingParams(max_tokens=r.output, ignore_eos=True)))
        for n, r in enumerate(workload(name))
    ]


# -- by hand ---------------------------------------------------------------------------------------------


def test_one_request_by_hand():
    result = simulate([Arrival(5.0, make(1, prompt=10, output=4))], limits(), one_second)
    (outcome,) = result.outcomes
    assert (outcome.queue, outcome.ttft, outcome.tpot, outcome.seconds) == (0.0, 1.0, 1.0, 4.0)
    assert (outcome.output_tokens, outcome.finish, outcome.error) == (4, "length", None)
    assert (result.steps, result.seconds, result.busy) == (4, 4.0, 4.0)
    assert result.output_tokens_per_s == 1.0
    assert result.input_tokens_per_s == 2.5
    assert (result.peak_pages, result.peak_running) == (1, 1)
    assert result.computed_tokens == 13


def test_a_second_request_waits_for_the_step_that_runs_and_for_a_row():
    trace = [Arrival(0.0, make(1, 10, 3)), Arrival(0.5, make(2, 10, 2))]
    beside = simulate(trace, limits(), one_second).outcomes[1]
    assert (beside.queue, beside.ttft, beside.seconds) == (0.5, 1.5, 2.5)
    trace = [Arrival(0.0, make(1, 10, 3)), Arrival(0.5, make(2, 10, 2))]
    behind = simulate(trace, limits(rows=1), one_second).outcomes[1]
    assert (behind.queue, behind.ttft, behind.seconds) == (2.5, 3.5, 4.5)


def test_idle_time_counts_for_the_trace_but_not_as_busy():
    trace = [Arrival(100.0, make(2, 4, 1)), Arrival(0.0, make(1, 4, 1))]
    result = simulate(trace, limits(), one_second)
    assert [outcome.id for outcome in result.outcomes] == [1, 2]
    assert (result.seconds, result.busy, result.steps) == (101.0, 2.0, 2)


def test_what_cannot_be_served_has_an_outcome_and_harms_nobody():
    trace = [
        Arrival(0.0, make(1, prompt=5000, output=1)),  # beyond the context
        Arrival(0.0, make(2, prompt=30, output=90)),  # outgrows the cache of 64 tokens
        Arrival(0.0, make(3, prompt=4, output=3)),
    ]
    result = simulate(trace, limits(pages=5), one_second)
    refused, outgrown, fine = result.outcomes
    assert refused.error is not None
    assert "5000" in refused.error
    assert (refused.ttft, refused.queue, refused.seconds) == (None, None, 0.0)
    assert outgrown.error is not None
    assert "4 pages" in outgrown.error
    assert outgrown.output_tokens == 35  # 64 entries: the 35th token would be the 65th
    assert (fine.finish, fine.output_tokens) == ("length", 3)


def test_nothing_to_do():
    result = simulate([], limits(), one_second)
    assert (result.steps, result.seconds, result.output_tokens_per_s) == (0, 0.0, 0.0)
    assert result.input_tokens_per_s == 0.0


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_times_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="step 0"):
        simulate([Arrival(0.0, make(1, 4, 1))], limits(), lambda step: wrong)
    with pytest.raises(ValueError, match="arrival"):
        simulate([Arrival(wrong, make(1, 4, 1))], limits(), one_second)


def test_a_stop_token_is_never_drawn_by_accident():
    params = SamplingParams(max_tokens=5, stop_token_ids=[0, 1])
    request = Request(1, [3], params, eos_ids=(2,))
    (outcome,) = simulate([Arrival(0.0, request)], limits(), one_second).outcomes
    assert (outcome.output_tokens, outcome.finish) == (5, "length")


# -- the cost of a step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-0.6b", "tiny-gemma3", "gpt2", "mixtral-8x7b"])
def test_costs_are_the_counts_of_the_spec(name):
    spec = preset(name)
    scheduler = Scheduler(limits(step_tokens=100, context=1024, vocabulary=9001))
    for n in range(3):
        scheduler.add(make(n, prompt=60 + n, output=9))
    for _ in range(4):
        step = scheduler.schedule()
        scheduler.update(step, [5] * len(step.sampling))
        flops, moved = StepCosts(spec).of(step)
        assert flops == sum(
            spec.forward_flops(c.count, c.start, logits=int(c.samples)) for c in step.chunks
        )
        weights = 2 * (
            spec.matmul_parameters() - (0 if step.sampling else spec.vocab * spec.hidden)
        )
        looked_at = sum(
            looked_at_in(layer, c, spec) for layer in range(spec.layers) for c in step.chunks
        )
        entries = looked_at + step.tokens * spec.layers
        moved_by_hand = weights + entries * 2 * 2 * spec.kv_heads * spec.head_dim
        if spec.experts is None:
            assert moved == pytest.approx(moved_by_hand)
        else:
            assert moved > moved_by_hand  # more experts than one token visits


def looked_at_in(layer: int, chunk: Chunk, spec: ModelSpec) -> int:
    """Entries that any of the chunk's queries sees, counted one by one."""
    window = spec.window(layer) or 10**9
    queries = range(chunk.start, chunk.start + chunk.count)
    return len({key for query in queries for key in range(max(0, query - window + 1), query + 1)})


def test_all_experts_are_read_when_many_tokens_choose():
    spec = preset("mixtral-8x7b")
    costs = StepCosts(spec)
    everything = spec.parameters() - spec.vocab * spec.hidden * 2
    assert costs._weights_read(1) == spec.matmul_parameters() - spec.vocab * spec.hidden
    assert costs._weights_read(10_000) == pytest.approx(everything, rel=1e-3)
    assert costs._weights_read(1) < costs._weights_read(4) < costs._weights_read(16)


def test_launches_come_on_top_and_missing_ceilings_are_an_error_at_once():
    step = Step(0)
    assert roofline_step_seconds(preset("qwen3-0.6b"), ceilings(launch=1e-6))(
        step
    ) == pytest.approx((8 * 28 + 2) * 1e-6 + 2 * 440_401_920 / BYTES_PER_S)
    fixed = roofline_step_seconds(preset("qwen3-0.6b"), ceilings(launch=1e-6), overhead_s=0.5)
    assert fixed(step) == pytest.approx(0.5 + 2 * 440_401_920 / BYTES_PER_S)
    with pytest.raises(HardwareError, match="fp8"):
        roofline_step_seconds(preset("qwen3-0.6b"), ceilings(), dtype="fp8")


# -- the five workloads --------------------------------------------------------------------------------------

# Qwen3-0.6B by hand: 28 layers of 1024 x (4096 + 2048) and 3 x 1024 x 3072, a head of 151936 x 1024;
# a token keeps 2 x 28 x 8 x 128 values, and attends with 4 x 28 x 16 x 128 FLOPs per token that it sees.
BODY = 28 * (1024 * 6144 + 3 * 1024 * 3072)
HEAD = 151_936 * 1024
KEPT = 2 * 28 * 8 * 128 * 2
PAIR = 4 * 28 * 16 * 128


def by_hand(steps: list[list[tuple[int, int, bool]]]) -> float:
    """Seconds of steps, each a list of (tokens, cached, samples)."""
    total = 0.0
    for step in steps:
        tokens = sum(new for new, _, _ in step)
        sampled = sum(samples for _, _, samples in step)
        flops = 2 * BODY * tokens + 2 * HEAD * sampled
        flops += PAIR * sum(new * old + new * (new + 1) // 2 for new, old, _ in step)
        moved = 2 * (BODY + (HEAD if sampled else 0))
        moved += KEPT * sum(2 * new + old for new, old, _ in step)
        total += max(moved / BYTES_PER_S, flops / FLOPS_PER_S)
    return total


def test_latency_by_hand():
    expected = by_hand([[(128, 0, True)], *([(1, 128 + n, True)] for n in range(255))])
    result = simulate(
        requests_of("latency"), limits(), roofline_step_seconds(preset("qwen3-0.6b"), ceilings())
    )
    assert result.steps == 256
    assert result.seconds == pytest.approx(expected)
    assert result.output_tokens_per_s == pytest.approx(3600, rel=0.03)


def test_prefill_by_hand():
    # A budget of 16384 is eight prompts, and each takes one token out at once.
    expected = by_hand([[(2048, 0, True)] * 8] * 8)
    result = simulate(
        requests_of("prefill"), limits(), roofline_step_seconds(preset("qwen3-0.6b"), ceilings())
    )
    assert result.steps == 8
    assert result.seconds == pytest.approx(expected)
    assert result.input_tokens_per_s == pytest.approx(700_000, rel=0.1)
    large = simulate(
        requests_of("prefill"), limits(), roofline_step_seconds(preset("qwen3-8b"), ceilings())
    )
    assert large.input_tokens_per_s == pytest.approx(54_000, rel=0.1)


def test_decode_by_hand():
    """Prompts enter a few at a time, while those before them decode already."""
    result = simulate(
        requests_of("decode"), limits(), roofline_step_seconds(preset("qwen3-0.6b"), ceilings())
    )
    lengths: list[tuple[int, int]] = []  # (entries, outputs) of each
    waiting, steps = 256, []
    part = 0  # of the prompt at the head, how much is done
    while waiting or lengths:
        budget, step = 16384, []
        for entries, _ in lengths:
            step.append((1, entries, True))
        budget -= len(step)
        lengths = [(entries + 1, outputs + 1) for entries, outputs in lengths]
        while waiting and budget:
            new = min(1024 - part, budget)
            step.append((new, part, part + new == 1024))
            budget -= new
            part += new
            if part == 1024:
                lengths.append((1024, 1))
                waiting, part = waiting - 1, 0
        lengths = [(entries, outputs) for entries, outputs in lengths if outputs < 256]
        steps.append(step)
    assert result.steps == len(steps)
    assert result.seconds == pytest.approx(by_hand(steps))


def test_shared_computes_the_prefix_once():
    result = simulate(
        requests_of("shared"), limits(), roofline_step_seconds(preset("qwen3-0.6b"), ceilings())
    )
    assert result.computed_tokens == 1792 + 256 * 256 + 256 * 63
    assert [outcome.cached_tokens for outcome in result.outcomes] == [0] + [1792] * 255
    without = simulate(
        requests_of("shared"),
        limits(pages=40_000),
        roofline_step_seconds(preset("qwen3-0.6b"), ceilings()),
        prefix_caching=False,
    )
    assert without.computed_tokens == 256 * 2048 + 256 * 63
    assert result.seconds < without.seconds


def test_nano_stays_below_its_limit_and_close_to_it():
    result = simulate(
        requests_of("nano"), limits(), roofline_step_seconds(preset("qwen3-0.6b"), ceilings())
    )
    assert result.output_tokens == 133_966
    # All entries that are read: the limit that prefill and decode share no step.
    keys = sum(KEPT * (len(r.prompt) + n) for r in workload("nano") for n in range(1, r.output))
    limit = 133_966 / ((keys + 1024 * 2 * (BODY + HEAD)) / BYTES_PER_S)
    assert 0.85 * limit < result.output_tokens_per_s < limit


# -- for any trace ----------------------------------------------------------------------------------------------

traces = st.lists(
    st.tuples(st.floats(0, 20), st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12
)


@given(traces, st.integers(1, 4), st.integers(1, 64), st.integers(5, 40))
def test_every_request_has_its_times_in_order(trace, rows, step_tokens, pages):
    arrivals = [
        Arrival(at, make(n, prompt, output)) for n, (at, prompt, output) in enumerate(trace)
    ]
    some = limits(rows=rows, step_tokens=step_tokens, pages=pages, page_size=4, context=100)
    result = simulate(arrivals, some, lambda step: 0.1 + 0.01 * step.tokens)
    assert result.peak_pages <= pages - 1
    assert result.peak_running <= rows
    assert result.busy <= result.seconds + 1e-9
    for outcome in result.outcomes:
        assert outcome.finish in ("length", "error")
        if outcome.queue is not None and outcome.ttft is not None:
            assert 0 <= outcome.queue <= outcome.ttft <= outcome.seconds
    assert result.output_tokens_per_s * result.seconds == pytest.approx(result.output_tokens)


@settings(max_examples=15)
@given(st.floats(1.0, 3.0), st.floats(1.0, 3.0), st.floats(0, 1e-4))
def test_a_faster_machine_is_never_slower(bandwidth, rate, launch):
    spec = preset("qwen3-0.6b")

    def seconds(machine: Ceilings) -> float:
        trace = [Arrival(0.0, make(n, 50 + 200 * n, 4)) for n in range(4)]
        return simulate(trace, limits(), roofline_step_seconds(spec, machine)).seconds

    faster = ceilings(bandwidth=bandwidth * BYTES_PER_S, rate=rate * FLOPS_PER_S)
    assert seconds(faster) <= seconds(ceilings()) <= seconds(ceilings(launch=launch))


def test_drafts_shorten_a_trace_as_far_as_they_hold():
    """64 tokens of one request by a length of 2.5, and never slower where steps cost what their tokens cost."""
    rates = rates_of_length(2.5, 4)

    def run(seconds, speculation):
        result = simulate(
            [Arrival(0.0, make(1, prompt=10, output=65))],
            limits(drafts=4),
            lambda step: seconds(step.tokens),
            speculation=speculation,
        )
        assert result.output_tokens == 65
        return result

    def drafting(**how):
        speculation = Speculation(NgramDrafter(), waits=True, **how)
        make_synthetic(speculation, rates, 1000)
        return speculation

    flat = run(lambda tokens: 1.0, drafting())
    assert flat.steps == pytest.approx(1 + 64 / 2.5, abs=6)
    steep = drafting(seconds=lambda tokens: float(tokens))  # the controller asks for none
    assert run(lambda tokens: float(tokens), steep).steps == 65
    assert steep.counts.drafted == 0
    bent = drafting(seconds=lambda tokens: 1.0 + 0.1 * tokens)
    plain = run(lambda tokens: 1.0 + 0.1 * tokens, None)
    assert run(lambda tokens: 1.0 + 0.1 * tokens, bent).seconds < 0.75 * plain.seconds
