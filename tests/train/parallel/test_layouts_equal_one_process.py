"""Every way to spread a model over ranks, alone and combined, computes what one process computes."""

import functools
import os

import pytest
from forked import run_ranks
from spread_training import alone, assert_same, one_rank, spec_of

from cairn.train.parallel.layout import Layout, Strategy

STEPS = int(os.environ.get("CAIRN_PARALLEL_STEPS", "2"))  # 10 for the long form
PER_STEP = 4  # microbatches of all data ranks, in a pipeline; otherwise two for each of them


@functools.cache
def expected(spec, per_step, tokens):
    return alone(spec, STEPS, per_step, tokens)


def check(
    spec,
    layout,
    options=Strategy(),  # noqa: B008
    tokens=16,
    recompute="none",
    fused=False,
    moved=0,
):
    per_step = PER_STEP if layout.pp > 1 else 2 * layout.data_ranks()
    traces = run_ranks(
        layout.world(),
        one_rank,
        spec,
        layout,
        options,
        STEPS,
        per_step,
        tokens,
        recompute,
        fused,
        moved,
    )
    assert_same(traces, expected(spec, per_step, tokens))
    return traces


TIED = spec_of("tiny-qwen3", layers=4)
# A vocabulary that no number of ranks divides, and heads with a sink.
UNTIED = spec_of("tiny-llama", layers=4, vocab=161, sinks=True)
LEARNED = spec_of("tiny-gpt2", layers=2)
WINDOWS = spec_of("tiny-gemma3", attention_softcap=5.0)
EXPERTS = spec_of("tiny-moe", layers=2)
LATENT = spec_of("tiny-deepseek")  # keys are wider than values
DELTA = spec_of("tiny-qwen3-next")


@pytest.mark.parametrize(
    ("spec", "layout", "options"),
    [
        pytest.param(TIED, Layout(tp=2), Strategy(), id="tp"),
        pytest.param(UNTIED, Layout(tp=2), Strategy(sequence_parallel=True), id="tp-sp-untied"),
        pytest.param(LEARNED, Layout(tp=2), Strategy(sequence_parallel=True), id="tp-sp-gpt2"),
        pytest.param(EXPERTS, Layout(tp=2), Strategy(sequence_parallel=True), id="tp-sp-experts"),
        pytest.param(DELTA, Layout(tp=2), Strategy(sequence_parallel=True), id="tp-sp-delta"),
        pytest.param(TIED, Layout(dp=2), Strategy(), id="dp"),
        pytest.param(UNTIED, Layout(dp=2, cp=2), Strategy(zero=1), id="dp-cp-zero1"),
        pytest.param(TIED, Layout(dp=2), Strategy(zero=2), id="zero2"),
        pytest.param(TIED, Layout(fsdp=2), Strategy(), id="fsdp"),
        pytest.param(UNTIED, Layout(dp=2, fsdp=2), Strategy(reshard=False), id="hsdp"),
        pytest.param(TIED, Layout(cp=2), Strategy(), id="ring"),
        pytest.param(WINDOWS, Layout(cp=4), Strategy(), id="ring-windows-softcap"),
        pytest.param(UNTIED, Layout(cp=2), Strategy(attention="ulysses"), id="ulysses"),
        pytest.param(EXPERTS, Layout(dp=2, ep=2), Strategy(), id="ep"),
        pytest.param(EXPERTS, Layout(dp=2, fsdp=2, ep=2), Strategy(), id="ep-hsdp"),
    ],
)
def test_without_a_pipeline(spec, layout, options):
    check(spec, layout, options)


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"])
def test_every_schedule_in_the_order_that_was_simulated(order):
    from cairn.train.parallel.pipeline.schedules import schedule

    layout = Layout(pp=2)
    traces = check(TIED, layout, Strategy(order=order))
    plan = schedule(order, layout.pp, PER_STEP)
    assert [tuple(trace["executed"]) for trace in traces] == list(plan.ranks)


@pytest.mark.parametrize(
    ("spec", "layout", "options"),
    [
        pytest.param(UNTIED, Layout(pp=4), Strategy(), id="pp4"),
        pytest.param(TIED, Layout(pp=2, tp=2), Strategy(sequence_parallel=True), id="pp-tp-sp"),
        pytest.param(UNTIED, Layout(pp=2, dp=2), Strategy(order="zbv", zero=2), id="zbv-dp-zero"),
        pytest.param(TIED, Layout(pp=2, fsdp=2), Strategy(order="interleaved"), id="pp-fsdp"),
        pytest.param(TIED, Layout(fsdp=2, cp=2), Strategy(), id="fsdp-cp"),
        pytest.param(UNTIED, Layout(fsdp=2, tp=2), Strategy(sequence_parallel=True), id="fsdp-tp"),
        pytest.param(EXPERTS, Layout(dp=2, ep=2, tp=2), Strategy(), id="ep-tp"),
        pytest.param(TIED, Layout(cp=2, tp=2), Strategy(sequence_parallel=True), id="cp-tp"),
        pytest.param(LATENT, Layout(cp=2, tp=2), Strategy(sequence_parallel=True), id="latent"),
        pytest.param(TIED, Layout(pp=2, cp=2), Strategy(order="dualpipev"), id="pp-cp"),
    ],
)
def test_pairs(spec, layout, options):
    check(spec, layout, options)


@pytest.mark.parametrize(
    ("spec", "layout", "options"),
    [
        pytest.param(TIED, Layout(dp=2, pp=2, tp=2), Strategy(), id="dp-pp-tp"),
        pytest.param(
            UNTIED, Layout(fsdp=2, pp=2, tp=2), Strategy(sequence_parallel=True), id="fsdp-pp-tp"
        ),
        pytest.param(TIED, Layout(pp=2, cp=2, tp=2), Strategy(order="zbv"), id="zbv-cp-tp"),
        pytest.param(EXPERTS, Layout(dp=2, pp=2, cp=2, ep=2), Strategy(), id="dp-pp-cp-ep"),
    ],
)
def test_three_dimensions_on_eight_ranks(spec, layout, options):
    check(spec, layout, options)


@pytest.mark.parametrize(
    ("recompute", "layout", "options"),
    [
        ("selective", Layout(pp=2, tp=2), Strategy(order="zbv")),
        ("full", Layout(pp=2, cp=2), Strategy(order="zb-h1")),
        ("full", Layout(fsdp=2), Strategy()),
    ],
)
def test_recomputing_changes_nothing(recompute, layout, options):
    check(TIED, layout, options, recompute=recompute)


@pytest.mark.parametrize(
    ("layout", "options", "fused"),
    [
        (Layout(dp=2), Strategy(zero=2), False),
        (Layout(fsdp=2), Strategy(), True),
    ],
)
def test_offloading_changes_nothing(layout, options, fused):
    check(UNTIED, layout, options, fused=fused, moved=3)


@pytest.mark.parametrize(
    ("spec", "layout", "options", "recompute"),
    [
        pytest.param(TIED, Layout(dp=2), Strategy(zero=2), "none", id="zero2"),
        pytest.param(UNTIED, Layout(fsdp=2), Strategy(), "full", id="fsdp"),
        pytest.param(TIED, Layout(tp=2), Strategy(), "selective", id="tp"),
        pytest.param(UNTIED, Layout(cp=2), Strategy(attention="ulysses"), "norms", id="ulysses"),
        pytest.param(TIED, Layout(pp=2), Strategy(order="zbv"), "full", id="zbv"),
        pytest.param(WINDOWS, Layout(cp=2), Strategy(), "none", id="ring-post-norms"),
        pytest.param(EXPERTS, Layout(dp=2, ep=2), Strategy(), "none", id="ep"),
        pytest.param(
            UNTIED, Layout(fsdp=2, tp=2), Strategy(sequence_parallel=True), "norms", id="fsdp-tp-sp"
        ),
        pytest.param(
            TIED,
            Layout(dp=2, pp=2, tp=2),
            Strategy(order="zb-h1", sequence_parallel=True),
            "none",
            id="dp-pp-tp-sp",
        ),
    ],
)
def test_the_fused_form_on_many_ranks(spec, layout, options, recompute):
    """Larger operations with a backward of their own, beside one process that knows none of them."""
    check(spec, layout, options, recompute=recompute, fused=True)
