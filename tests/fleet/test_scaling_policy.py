import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cairn.fleet.scaling_policy import BUSY, Arrived, LoadMeter, Rules, Seen, decide, late_share
from cairn.fleet.simulate import span_s
from cairn.fleet.simulate_prompts import conversations, fitting, prompts_of
from cairn.fleet.simulate_replica import speed_of
from cairn.fleet.simulate_scale import run_scaled
from cairn.plan.slo import Slo
from cairn.serve.engine.request import Limits


def seconds(step) -> float:
    return 5e-3 + 2e-4 * step.tokens


rules = st.builds(
    lambda least, more, rows, ttft: Rules(least=least, most=least + more, rows=rows, ttft_s=ttft),
    st.integers(0, 3),
    st.integers(1, 8),
    st.integers(1, 256),
    st.floats(0.1, 5),
)
seen = st.builds(
    Seen, now_s=st.just(1000.0), ready=st.integers(0, 8), starting=st.integers(0, 3), held=st.integers(0, 50),
    in_flight=st.integers(0, 2000), wait_s=st.floats(0, 20), prefill=st.floats(0, 10),
    prefill_before=st.floats(0, 10), idle_s=st.floats(0, 1000), calm_s=st.floats(0, 1000),
    recent=st.lists(st.builds(Arrived, st.floats(0, 60), st.floats(0.01, 3)), max_size=12).map(sorted),
)  # fmt: skip


@given(seen, rules)
def test_the_target_stays_within_the_rules_and_goes_down_by_one_at_most(now, rule):
    target = decide(now, rule)
    have = now.ready + now.starting
    assert rule.least <= target <= rule.most
    assert target == 0 or target >= min(have, rule.most) - 1
    if now.held or now.in_flight:
        assert target >= 1


@given(seen, rules)
def test_constant_load_never_oscillates(now, rule):
    """After a server was taken away, the same load does not ask for it back."""
    target = decide(now, rule)
    if 0 < target < now.ready and not now.starting:
        fewer = Seen(**{**{name: getattr(now, name) for name in Seen.__struct_fields__}, "ready": target,
                        "prefill_before": now.prefill, "calm_s": 0.0})  # fmt: skip
        assert decide(fewer, rule) == target


def test_nobody_is_left_waiting_at_zero_and_zero_comes_after_the_idle_time():
    rule = Rules(least=0, most=4, idle_s=60)
    empty = Seen(now_s=0, ready=0, starting=0, idle_s=10)
    assert decide(empty, rule) == 0
    assert decide(Seen(now_s=0, ready=0, starting=0, held=1, idle_s=math.inf), rule) == 1
    assert decide(Seen(now_s=0, ready=1, starting=0, idle_s=59), rule) == 1
    assert decide(Seen(now_s=0, ready=1, starting=0, idle_s=60), rule) == 0
    assert decide(Seen(now_s=0, ready=1, starting=0, idle_s=60, in_flight=1), rule) == 1


def test_growing_load_is_met_before_it_is_there():
    meter, rule = LoadMeter(), Rules(least=1, most=16, start_s=30)
    for second in range(60):  # one server's worth in a second at the end, growing evenly
        meter.arrived(float(second), second / 60)
    now = meter.seen(60.0, ready=1, starting=0, held=0, in_flight=3, wait_s=0.0)
    assert now.prefill > now.prefill_before > 0
    assert decide(now, rule) == math.ceil((2 * now.prefill - now.prefill_before) / BUSY)


def test_bursts_are_provided_for_and_a_held_request_counts_when_it_came():
    """Nine at a time, a third of a second each, every four seconds: the average load is of less than one server."""
    meter, rule = LoadMeter(), Rules(least=1, most=8, ttft_s=2.0)
    for burst in range(30):
        for _ in range(9):
            meter.arrived(4.0 * burst, 0.3)
    now = meter.seen(118.0, ready=3, starting=0, held=0, in_flight=0, wait_s=0.0)
    assert late_share(now.recent, 2, 2.0) > 0.02 >= late_share(now.recent, 3, 2.0)
    assert decide(now, rule) == 3
    alone = msgspec.structs.replace(now, recent=now.recent[::9])
    assert decide(alone, rule) == 2
    late = LoadMeter()
    for burst in range(30):  # known at once, when a server is up
        late.arrived(120.0, 0.3, 4.0 * burst)
    waited = late.seen(120.0, ready=1, starting=0, held=0, in_flight=0, wait_s=0.0)
    assert late_share(waited.recent, 1, 2.0) == 0


def test_a_trace_that_comes_and_goes_needs_fewer_server_hours_for_nearly_the_same_goodput():
    trace = []
    for wave in range(3):  # a minute of conversations, four minutes of calm
        part = conversations(60, seed=wave)
        last = part[-1].at_s
        trace += [
            msgspec.structs.replace(one, at_s=300 * wave + 60 * one.at_s / last) for one in part
        ]
    limits = Limits(rows=32, step_tokens=2048, context=8192, pages=400, page_size=128, vocabulary=9)
    prompts = prompts_of(fitting(trace, limits.context), limits.page_size)
    speed = speed_of(seconds)
    load = span_s(prompts, speed, 4, 1.0) / prompts[-1].traced.at_s  # the trace as it is
    slo = Slo(4.0, 0.06)

    def run(**changes):
        rule = Rules(
            **({"most": 4, "rows": 32, "ttft_s": 4.0, "start_s": 5.0, "idle_s": 40.0} | changes)
        )
        return run_scaled(prompts, load, rule, limits, seconds, slo)

    fixed, one, zero = run(least=4, most=4), run(least=1), run(least=0)
    assert zero.outcome.requests == one.outcome.requests == fixed.outcome.requests
    assert zero.changes >= 6  # up and down to zero in every wave
    assert one.good_per_server_hour > 2 * fixed.good_per_server_hour
    assert zero.good_per_server_hour > 4 * fixed.good_per_server_hour
    assert one.outcome.good_share > 0.9 * fixed.outcome.good_share
    assert zero.outcome.good_share > 0.75 * fixed.outcome.good_share
