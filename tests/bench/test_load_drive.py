"""Who is sent when, to the microsecond: the drivers run against a simulated clock and a server that is a formula."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_time import run_simulated

from cairn.bench.load_answer import RequestRecord
from cairn.bench.load_drive import closed_loop, open_loop
from cairn.bench.load_prompts import LoadRequest
from cairn.bench.load_stats import in_flight


class Formula:
    """Answers the n-th request after its own number of seconds."""

    def __init__(self, service_s):
        self.service_s = itertools.cycle(service_s)
        self.prepared = 0

    def prepare(self, ask):
        self.prepared += 1
        return ask

    async def send(self, prepared, due_s):
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        await asyncio.sleep(next(self.service_s))
        return RequestRecord(due_s=due_s, sent_s=sent_s, end_s=clock())


def asks(count=None):
    endless = (LoadRequest([number], 1) for number in itertools.count())
    return itertools.islice(endless, count)


times = st.lists(st.floats(0, 100), min_size=1, max_size=30).map(sorted)
services = st.lists(st.floats(0.001, 50), min_size=1, max_size=5)


@given(times, services)
def test_an_open_loop_does_not_wait_for_the_server(arrivals, service_s):
    records = run_simulated(open_loop(Formula(service_s), asks(), arrivals))
    assert len(records) == len(arrivals)
    due = sorted(record.due_s for record in records)
    assert due == pytest.approx(arrivals)
    assert all(record.sent_s == pytest.approx(record.due_s, abs=1e-6) for record in records)


@given(times, services, st.integers(1, 4))
def test_with_a_limit_what_waits_has_been_due_all_the_while(arrivals, service_s, limit):
    records = run_simulated(open_loop(Formula(service_s), asks(), arrivals, limit))
    assert sorted(record.due_s for record in records) == pytest.approx(arrivals)
    busy = [RequestRecord(due_s=r.sent_s, sent_s=r.sent_s, end_s=r.end_s) for r in records]
    assert max(level for _, level in in_flight(busy)) <= limit


def test_a_queue_of_one_server_is_the_textbook_one():
    """Arrivals each second, service of three: the n-th waits 2n seconds, and its latency shows it."""
    records = run_simulated(open_loop(Formula([3.0]), asks(), [0.0, 1.0, 2.0, 3.0], limit=1))
    assert [r.e2e_s for r in records] == pytest.approx([3, 5, 7, 9])


@given(st.integers(1, 6), st.integers(1, 40), services)
def test_a_closed_loop_keeps_so_many_at_a_time(concurrency, count, service_s):
    sender = Formula(service_s)
    records = run_simulated(closed_loop(sender, asks(), concurrency, count=count))
    assert len(records) == count == sender.prepared
    assert max(level for _, level in in_flight(records)) == min(concurrency, count)


def test_a_closed_loop_begins_nothing_after_its_time_and_waits_for_the_rest():
    records = run_simulated(closed_loop(Formula([3.0]), asks(), 2, duration_s=7.0))
    assert sorted(r.due_s for r in records) == pytest.approx([0, 0, 3, 3, 6, 6])
    assert max(r.end_s for r in records) == pytest.approx(9)


def test_both_end_with_the_prompts():
    assert len(run_simulated(closed_loop(Formula([1.0]), asks(5), 2, duration_s=100))) == 5
    assert len(run_simulated(open_loop(Formula([1.0]), asks(5), [0.0] * 9))) == 5


def test_who_watches_sees_every_end():
    seen = []
    run_simulated(
        open_loop(Formula([2.0]), asks(), [0.0, 1.0, 5.0], moved=lambda *now: seen.append(now))
    )
    assert seen == [(1, 1), (2, 0), (3, 0)]
