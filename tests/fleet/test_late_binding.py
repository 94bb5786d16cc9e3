"""Requests that wait in the router until a server is about to run dry: the rules, the router, and what they are for."""

import asyncio
import random
from itertools import accumulate, permutations
from math import inf

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from test_router import ask, fleet
from test_simulate import LIMITS
from test_simulate import seconds as step_seconds

from cairn.bench.arrival_traces import TracedRequest
from cairn.fleet.deadlines import by_deadline
from cairn.fleet.index import KeyIndex
from cairn.fleet.late_binding import AHEAD_STEPS, bind, in_order, runs_dry
from cairn.fleet.router import NO_KEYS
from cairn.fleet.routing_policy import Ask, best, seconds
from cairn.fleet.scaling_policy import ScaledModel
from cairn.fleet.simulate import run_policy
from cairn.fleet.simulate_prompts import prompts_of
from cairn.fleet.worker import Worker, candidates
from cairn.plan.slo import Slo
from cairn.serve.pulse import Hello
from cairn.serve.text_keys import PromptKeys

STEP_TOKENS = 100


class One(msgspec.Struct, frozen=True):
    ask: Ask
    arrived_s: float = 0.0

    @property
    def keys(self) -> PromptKeys:
        return NO_KEYS

    @property
    def new_tokens(self) -> int:
        return self.ask.prompt_tokens


def server(number: int = 0, queued: int = 0) -> Worker:
    made = Worker(number, f"http://x:{number + 1}")
    made.up(Hello(0, ["m"], 16, True, 64, step_tokens=STEP_TOKENS))
    if queued:
        made.takes(queued, streams=True)
    return made


QUEUES = st.lists(st.sampled_from([0, 1, 500, 5000]), min_size=2, max_size=5)
PROMPTS = st.lists(
    st.tuples(st.integers(1, 4000), st.floats(0, 10)), min_size=1, max_size=8, unique=True
)


@given(QUEUES, PROMPTS)
def test_only_a_server_that_is_about_to_run_dry_gets_the_first_one_that_wants_it(queues, prompts):
    workers = [server(at, queued) for at, queued in enumerate(queues)]
    waiting = [One(Ask(at, tokens), came) for at, (tokens, came) in enumerate(prompts)]
    dry = [runs_dry(one) for one in workers]
    bound = bind(waiting, workers, KeyIndex(), seconds, 0.0)
    if bound is None:
        assert not all(dry)
        return
    assert dry[bound.place]
    assert bound.costs[bound.place] == min(bound.costs)
    if all(dry):  # then it is the decision of one that need not wait
        assert bound.request is waiting[0]
        place, costs = best(seconds, waiting[0].ask, candidates(workers, {}))
        assert (bound.place, bound.costs) == (place, costs)


def test_a_server_gets_prompts_for_its_next_steps_and_those_that_nobody_sees_computed_do_not_count():
    silent, busy, whole = Worker(0, "http://x:1"), server(), server()
    silent.takes(100_000, streams=True)
    whole.takes(100_000, streams=False)
    assert runs_dry(silent)  # it has told no size of its steps
    assert runs_dry(whole)
    busy.takes(AHEAD_STEPS * STEP_TOKENS - 1, streams=True)
    assert runs_dry(busy)
    busy.takes(1, streams=True)
    assert not runs_dry(busy)
    busy.computed(1, streams=True)
    assert runs_dry(busy)
    assert (busy.waiting, busy.queued_tokens) == (1, AHEAD_STEPS * STEP_TOKENS - 1)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 99)), min_size=1, max_size=40))
def test_who_has_waited_longer_for_a_shorter_prompt_goes_first_and_nobody_is_passed_for_ever(many):
    waiting = [One(Ask(at, tokens), came / 10) for at, (tokens, came) in enumerate(many)]
    ordered = in_order(waiting, 10.0)
    assert sorted(ordered, key=id) == sorted(waiting, key=id)
    for at, one in enumerate(ordered):
        for other in ordered[at + 1 :]:
            assert not (other.arrived_s < one.arrived_s and other.new_tokens <= one.new_tokens), (
                "passed by one that came later with more to compute"
            )
    longest = max(waiting, key=lambda one: one.new_tokens)
    # A prompt of one token that has waited for a 55th of its time is behind it: sqrt(3000) is 54.8.
    came_s = 10.0 - (10.0 - longest.arrived_s) / 55
    short = One(Ask(99, 1), came_s if longest.new_tokens == 3000 else 10.0)
    assert in_order([short, longest], 10.0)[0] is longest


@given(
    st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 9)), min_size=1, max_size=6),
    st.floats(0.1, 3),
    st.sampled_from([0, 500, 5000]),
    st.booleans(),
)
def test_those_go_first_that_hold_the_promise_together(many, ttft_s, queued, alike):
    one, now_s = server(queued=queued), 1.0
    waiting = [
        One(Ask(at, 700 if alike else tokens), came / 10) for at, (tokens, came) in enumerate(many)
    ]
    each_s = one.token_s + one.step_s / STEP_TOKENS

    def in_time(order) -> list[bool]:
        ends = accumulate((asked.new_tokens for asked in order), initial=queued)
        next(ends)  # of what is at the server
        return [
            now_s + end * each_s <= asked.arrived_s + ttft_s + 1e-9
            for end, asked in zip(ends, order, strict=True)
        ]

    order = by_deadline(waiting, [one], ttft_s, now_s)
    assert sorted(order, key=id) == sorted(waiting, key=id)
    held = sum(in_time(order))
    assert all(in_time(order[:held]))
    if alike:  # no other order holds it for more
        assert held == max(sum(in_time(other)) for other in permutations(waiting))
    assert by_deadline(waiting, [one], inf, now_s) == in_order(waiting, now_s)


def test_a_long_prompt_yields_where_it_would_make_two_others_late():
    long, *short = [One(Ask(at, tokens), 0.0) for at, tokens in enumerate((4000, 1000, 1000))]
    assert by_deadline([long, *short], [server()], 1.0, 0.0) == [*short, long]
    assert by_deadline([long, *short], [server(), server(1)], 1.0, 0.0)[0] is long  # 0.9 s of 1


def test_where_a_time_is_promised_even_one_server_gets_first_what_can_be_in_time():
    sent: list[int] = []

    async def check(url, servers, router):
        send, (worker,) = router.send, router.workers
        router.send = lambda exchange, *rest: (
            sent.append(exchange.ask.prompt_tokens),
            send(exchange, *rest),
        )
        router.scaled.append(ScaledModel(["fake"], 0.0, ttft_s=5.0))
        servers[0].frozen_answers, worker.step_tokens = True, 64
        asked = [asyncio.create_task(ask(url, "abcd" * 200, 3, model="fake"))]
        for waiting, prompt in enumerate((20_000, 10), start=1):  # the first one takes 6.75 s
            while worker.waiting != 1 or len(router.waiting) != waiting - 1:
                await asyncio.sleep(0.005)
            asked.append(asyncio.create_task(ask(url, "abcd" * prompt, 3, model="fake")))
            await asyncio.sleep(0.3)
        assert len(router.waiting) == 2
        servers[0].frozen_answers = False
        assert [(await one)[0] for one in asked] == [200, 200, 200]

    fleet(check, count=1, stuck_s=0)
    first, short, late = sent
    assert short < first < late


def test_requests_wait_in_the_router_for_the_server_that_answers_first():
    async def check(url, servers, router):
        for one, worker in zip(servers, router.workers, strict=True):
            one.frozen_answers, worker.step_tokens = True, 64
        first = [asyncio.create_task(ask(url, "abcd" * 200, 3)) for _ in range(2)]
        while [one.waiting for one in router.workers] != [1, 1]:
            await asyncio.sleep(0.005)
        later = asyncio.create_task(ask(url, "abcd" * 20, 3))
        while not router.waiting:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert len(router.waiting) == 1
        servers[1].frozen_answers = False
        assert (await later)[0] == 200
        assert [len(one.served) for one in servers] == [1, 2]
        servers[0].frozen_answers = False
        assert [(await one)[0] for one in first] == [200, 200]

    fleet(check, stuck_s=0)


def test_a_request_that_has_waited_for_too_long_goes_to_the_best_server_all_the_same():
    async def check(url, servers, router):
        for worker in router.workers:
            worker.step_tokens = 1
            worker.takes(10, streams=True)  # and they are never computed
        assert (await ask(url, "abcd" * 20, 3))[0] == 200
        for worker in router.workers:
            worker.computed(10, streams=True)

    fleet(check, hold_s=0.3)


def test_waiting_in_the_router_keeps_most_first_tokens_and_all_later_ones_from_waiting(monkeypatch):
    """Prompts of very different lengths, which is where a queue at a server costs most."""
    draw, at_s, trace = random.Random(4), 0.0, []
    for number in range(200):
        at_s += draw.expovariate(1)
        blocks = min(max(int(draw.lognormvariate(2, 1)), 1), 60)
        trace.append(TracedRequest(at_s, 512 * blocks, 60, (-1 - number,) * blocks))
    limits = msgspec.structs.replace(LIMITS, context=32768, pages=2000, step_tokens=1024)
    prompts = prompts_of(trace, limits.page_size)

    def run():
        return run_policy("seconds", prompts, 1.0, 4, limits, step_seconds, Slo(1.0, 0.05))

    late = run()
    monkeypatch.setattr("cairn.fleet.simulate.LATE", frozenset())
    at_once = run()
    assert late.requests == at_once.requests == 200
    assert late.ttft_p50_s < at_once.ttft_p50_s
    assert late.tpot_p99_s < at_once.tpot_p99_s
    assert late.goodput > 1.1 * at_once.goodput
