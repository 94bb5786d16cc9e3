"""Servers that say that they are healthy, and give nobody a token."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from fake_servers import text_of
from hypothesis import given
from hypothesis import strategies as st
from test_router import ask, fleet

from cairn.fleet.exchange import Exchange
from cairn.fleet.failing_servers import leave_stuck
from cairn.fleet.request_head import request_head
from cairn.fleet.stuck_servers import StuckServers
from cairn.fleet.wire import HttpRequest
from cairn.fleet.worker import LOST, MOST_FAILURES, REST_S, Worker, candidates
from cairn.serve.pulse import Hello, Load
from cairn.serve.text_keys import RequestFields


def test_streams_of_a_stuck_server_go_on_elsewhere_and_it_rests():
    async def check(url, servers, router):
        servers[0].stuck_after = servers[1].stuck_after = 3
        asked = [asyncio.create_task(ask(url, f"p{at}", 8)) for at in range(6)]
        async with asyncio.timeout(20):
            while not all(server.served for server in servers):
                await asyncio.sleep(0.01)
        servers[1].stuck_after = None
        for at, answer in enumerate(asked):
            assert (await answer)[:2] == (200, text_of(f"p{at}", 8))
        stuck = router.workers[0]
        assert stuck.lost >= MOST_FAILURES
        assert stuck.state == "up"
        assert "no token" in stuck.why(stuck.rests_until_s - 0.01)

    fleet(check, stuck_s=REST_S + 0.1)


def test_no_more_requests_leave_than_others_have_room_for():
    async def check(url, servers, router):
        servers[0].stuck_after = servers[1].stuck_after = 3
        asked = [asyncio.create_task(ask(url, f"p{at}", 8)) for at in range(12)]
        async with asyncio.timeout(20):
            while sum(worker.pieces for worker in router.workers) < 12 * 3:
                await asyncio.sleep(0.01)
        first, second = router.workers
        room, held = MOST_FAILURES, first.decoding
        assert held > room
        second.capacity = second.decoding + room
        now = time.monotonic()
        leave_stuck(router, now)
        leave_stuck(router, now + 1000.0)
        assert (first.lost, first.decoding, second.waiting) == (room, held - room, room)
        assert first.rests_until_s == now + 1900.0  # not the short rest for requests that were lost
        assert (second.lost, len(router.waiting)) == (0, 0)
        servers[0].stuck_after = servers[1].stuck_after = None
        for at, answer in enumerate(asked):
            assert (await answer)[:2] == (200, text_of(f"p{at}", 8))

    fleet(check, stuck_s=900.0)


def test_who_should_be_getting_tokens():
    """Not before the first one of a server whose speed is not known, and not where the client does not read."""
    head = request_head(b"POST", b"/v1/completions", b"")
    request, asked = HttpRequest(head, b"", None), RequestFields()
    router = SimpleNamespace(waiting=SimpleNamespace(models={}))
    exchange = Exchange(router, SimpleNamespace(), request, b"id", None, None, None, asked)
    worker = Worker(0, "http://x:1")
    exchange.assign(worker, 10)
    assert not exchange.expects_tokens
    exchange.streams = True
    assert not exchange.expects_tokens
    worker.told(Load(token_s=1e-3))
    assert exchange.expects_tokens
    worker.told(Load())
    exchange._note_first_token()
    assert exchange.expects_tokens
    exchange.pause(True)
    assert not exchange.expects_tokens


def test_lost_requests_do_not_end_a_longer_rest():
    worker = Worker(0, "http://x:1")
    worker.rest(10.0, "no token")
    for _ in range(MOST_FAILURES):
        worker.failed(0.0)
    assert (worker.rests_until_s, worker.rest_reason) == (10.0, "no token")
    worker.up(None)
    for _ in range(MOST_FAILURES):
        worker.failed(20.0)
    assert (worker.rests_until_s, worker.why(20.5)) == (20.0 + REST_S, LOST)


def test_where_nobody_else_could_answer_everybody_waits():
    async def check(url, servers, router):
        servers[0].stuck_after = 2
        answer = asyncio.create_task(ask(url, "p", 5))
        await asyncio.sleep(0.6)
        servers[0].stuck_after = None
        assert (await answer)[:2] == (200, text_of("p", 5))
        assert router.workers[0].lost == 0

    fleet(check, count=1, stuck_s=0.2)


def watched() -> tuple[StuckServers, Worker]:
    worker = Worker(0, "http://x:1")
    worker.up(Hello(1, ["m"], 16, True, 8))
    return StuckServers(), worker


@given(st.lists(st.tuples(st.floats(0.01, 1.9), st.booleans()), min_size=1, max_size=60))
def test_a_server_rests_only_after_the_limit_without_a_piece(moments):
    watch, worker = watched()
    now = last = 0.0
    watch.rest_s(worker, True, 2.0, now)
    for gap, comes in moments:
        now += gap
        worker.pieces += comes
        rest = watch.rest_s(worker, True, 2.0, now)
        assert (rest is not None) == (not comes and now - last >= 2.0)
        if comes or rest is not None:
            last = now


def test_prompts_that_wait_give_it_more_time_and_rests_grow_until_something_comes():
    watch, worker = watched()
    worker.queued_tokens = 40_000  # a second of the usual server
    watch.rest_s(worker, True, 1.0, 0.0)
    assert watch.rest_s(worker, True, 1.0, 2.5) is None
    assert watch.rest_s(worker, True, 1.0, 3.5) == 1.0
    worker.queued_tokens = 0
    assert [watch.rest_s(worker, True, 1.0, at) for at in (5.0, 7.0)] == [2.0, 4.0]
    assert watch.rest_s(worker, False, 1.0, 60.0) is None  # nobody waits for it
    worker.pieces += 1
    watch.rest_s(worker, True, 1.0, 61.0)
    assert watch.rest_s(worker, True, 1.0, 63.0) == 1.0


def test_a_server_where_requests_of_others_wait_is_not_judged():
    watch, worker = watched()
    worker.waiting = 2
    watch.rest_s(worker, True, 1.0, 0.0)
    worker.told(Load(waiting=3))
    assert watch.rest_s(worker, True, 1.0, 60.0) is None
    worker.told(Load(waiting=2))  # those from here
    assert watch.rest_s(worker, True, 1.0, 60.5) is None
    assert watch.rest_s(worker, True, 1.0, 62.0) == 1.0


@pytest.mark.parametrize("lie", [float("nan"), float("inf"), -1.0, 1e300])
def test_times_that_cannot_be_are_not_believed(lie):
    """A server that lies about its speed is neither chosen for everything nor does it spoil the others' costs."""
    liar, usual = Worker(0, "http://x:1"), Worker(1, "http://x:2")
    for worker in (liar, usual):
        worker.up(None)
    liar.told(Load(step_s=lie, token_s=lie, row_s=lie))
    seen = candidates([liar, usual], {})
    assert seen[0] == seen[1]
