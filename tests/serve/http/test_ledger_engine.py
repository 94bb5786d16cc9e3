"""Rates and counters from totals that are read now and then, from engines that may begin again."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.serve.engine.messages import Stats
from cairn.serve.http.ledger.engine_view import RATE_S, Rates, Totals
from cairn.serve.http.server import service
from cairn.serve.http.server.counts import EngineTotals, Gaps, server_metrics

steady = st.lists(st.floats(0.05, 1.0), min_size=12, max_size=60)


@given(steady, st.integers(1, 10**6), st.integers(0, 1000))
def test_a_steady_rate_is_found_however_often_one_looks(pauses, output, prompt):
    rates, now = Rates(), 0.0
    for pause in pauses:
        now += pause
        rates.see(Totals(now, round(now * prompt), round(now * output)))
    view = rates.view()
    span = min(now - pauses[0], RATE_S)  # rounding to whole tokens at both ends
    assert view.output_tokens_per_s == pytest.approx(output, abs=1 / span + 1e-3)
    assert view.prompt_tokens_per_s == pytest.approx(prompt, abs=1 / span + 1e-3)


def test_old_rates_are_forgotten_and_a_new_engine_begins_at_nothing():
    rates = Rates()
    for second in range(20):
        rates.see(Totals(float(second), 0, 100 * second))
    for second in range(20, 30):
        rates.see(Totals(float(second), 0, 1900))  # nothing more
    assert rates.view().output_tokens_per_s == 0
    rates.see(Totals(30.0, 0, 5))
    assert rates.view().output_tokens_per_s == 0
    rates.see(Totals(30.0, 0, 5))  # the same moment again
    rates.see(Totals(31.0, 0, 25))
    assert rates.view().output_tokens_per_s == 20


def test_one_look_is_no_rate():
    rates = Rates()
    assert rates.view().output_tokens_per_s == 0
    rates.see(Totals(5.0, 7, 7))
    assert rates.view().prompt_tokens_per_s == 0


def test_counters_go_on_when_an_engine_begins_again():
    metrics, totals = server_metrics("m", Gaps("m")), EngineTotals("m")
    for steps, preempted, found in ((5, 1, 10), (9, 3, 10), (9, 3, 10), (2, 1, 4), (6, 1, 8)):
        totals.count(
            metrics,
            Stats(
                steps=steps,
                preempted=preempted,
                prefix_hits=found,
                device_s=steps / 2,
                drafted=2 * found,
                accepted=found,
                draft_runs=found // 2,
                accepted_at=(found // 2, found - found // 2),
            ),
        )
    assert metrics.value("cairn_preempted_requests_total", model="m") == 3 + 1
    assert metrics.value("cairn_prefix_found_tokens_total", model="m") == 10 + 8
    assert metrics.value("cairn_spec_decode_num_draft_tokens_total", model="m") == 20 + 16
    assert metrics.value("cairn_spec_decode_num_accepted_tokens_total", model="m") == 10 + 8
    assert metrics.value("cairn_spec_decode_num_drafts_total", model="m") == 5 + 4
    second = "cairn_spec_decode_num_accepted_tokens_per_pos_total"
    assert metrics.value(second, model="m", position="1") == 5 + 4
    assert metrics.value("cairn_engine_seconds_total", model="m", part="device") == 4.5 + 3


def test_an_engine_that_began_again_and_has_overtaken_is_noticed():
    """It has taken more steps than the one before when it is first seen; another total says that it is new."""
    metrics, totals = server_metrics("m", Gaps("m")), EngineTotals("m")
    totals.count(metrics, Stats(steps=5, preempted=4, device_s=1.0))
    totals.count(metrics, Stats(steps=50, preempted=1, device_s=3.0))
    assert metrics.value("cairn_preempted_requests_total", model="m") == 4 + 1
    assert metrics.value("cairn_engine_seconds_total", model="m", part="device") == 1.0 + 3.0


def test_what_is_done_every_second_is_done_on_after_a_failure(monkeypatch, caplog):
    """Otherwise nobody would take the engine's events of pages any more, and they would be kept for ever."""
    monkeypatch.setattr(service, "TICK_S", 0.0)
    looks = []

    class Failing:
        async def _look_after(self):
            looks.append(True)
            raise ValueError("an adapter")

    async def check() -> None:
        task = asyncio.create_task(service.Service._tick(Failing()))
        while len(looks) < 3:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(check())
    assert [record.message for record in caplog.records] == ["what is done every second has failed"]
