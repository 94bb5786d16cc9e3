"""Servers that say that they are healthy, and give nobody a token."""

import asyncio

from fake_servers import text_of
from hypothesis import given
from hypothesis import strategies as st
from test_router import ask, fleet

from cairn.fleet.wedge import WedgeWatch
from cairn.fleet.worker import Worker
from cairn.serve.pulse import Hello


def test_streams_of_a_wedged_server_go_on_elsewhere_and_it_rests():
    async def check(url, servers, router):
        servers[0].wedged_after = servers[1].wedged_after = 3
        asked = [asyncio.create_task(ask(url, f"p{at}", 8)) for at in range(6)]
        while not all(server.served for server in servers):
            await asyncio.sleep(0.01)
        servers[1].wedged_after = None
        for at, answer in enumerate(asked):
            assert (await answer)[:2] == (200, text_of(f"p{at}", 8))
        assert not router.workers[0].eligible(router.workers[0].rests_until_s - 0.01, None)
        assert router.workers[0].state == "up"
        assert "no token" in router.workers[0].why(router.workers[0].rests_until_s - 0.01)

    fleet(check, wedge_s=0.5)


def test_where_nobody_else_could_answer_everybody_waits():
    async def check(url, servers, router):
        servers[0].wedged_after = 2
        answer = asyncio.create_task(ask(url, "p", 5))
        await asyncio.sleep(0.6)
        servers[0].wedged_after = None
        assert (await answer)[:2] == (200, text_of("p", 5))
        assert router.workers[0].lost == 0

    fleet(check, count=1, wedge_s=0.2)


def watched() -> tuple[WedgeWatch, Worker]:
    worker = Worker(0, "http://x:1")
    worker.up(Hello(1, ["m"], 16, True, 8))
    return WedgeWatch(), worker


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
