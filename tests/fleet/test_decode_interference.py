"""What a prompt costs the answers beside it, against steps that are counted one by one; and for whom it waits."""

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_router import ask as post
from test_router import fleet

from cairn.fleet.decode_interference import Answers, answers_of
from cairn.fleet.index import KeyIndex
from cairn.fleet.late_binding import bind
from cairn.fleet.router import NO_KEYS
from cairn.fleet.routing_policy import Ask, Candidate, seconds, wait_for_answers_s
from cairn.fleet.worker import Worker
from cairn.serve.pulse import Hello, Load

STEP_S, CHUNK_S = 0.005, 0.025


class One(msgspec.Struct, frozen=True):
    answer_tokens: int
    tokens_so_far: int = 0


requests = st.lists(
    st.integers(1, 300).flatmap(lambda n: st.builds(One, st.just(n), st.integers(0, n - 1))),
    max_size=12,
)


def ends_s(left: int, chunks: int) -> float:
    """When the last of so many tokens comes: each step gives one, and the first steps have a chunk of the prompt."""
    return sum(STEP_S + (CHUNK_S if at < chunks else 0.0) for at in range(left))


@given(requests, st.integers(1, 60))
def test_an_answer_ends_later_by_the_chunks_that_are_computed_before_its_end(under_way, chunks):
    counted = sum(
        (one.answer_tokens - one.tokens_so_far)
        / one.answer_tokens
        * (
            ends_s(one.answer_tokens - one.tokens_so_far, chunks)
            - ends_s(one.answer_tokens - one.tokens_so_far, 0)
        )
        for one in under_way
    )
    answers = answers_of(under_way)
    assert answers.delay_s(chunks * CHUNK_S, CHUNK_S) == pytest.approx(counted)
    assert answers.plus(7).delay_s(chunks * CHUNK_S, CHUNK_S) == pytest.approx(
        answers_of([*under_way, One(7)]).delay_s(chunks * CHUNK_S, CHUNK_S)
    )


@given(requests, st.integers(1, 60), st.floats(0, 2), st.floats(0, 3))
def test_the_wait_is_the_best_of_all_ends_of_answers(under_way, chunks, most_s, weight):
    answers, prompt_s = answers_of(under_way), chunks * CHUNK_S
    now_s = answers.delay_s(prompt_s, CHUNK_S)
    options = [(now_s, 0.0)]
    for at, left in enumerate(answers.tokens_left):
        if left * STEP_S <= most_s:
            rest_s = answers.delay_s(prompt_s, CHUNK_S, at + 1)
            options.append(((1 + weight) * left * STEP_S + rest_s, left * STEP_S))
    waits_s, cost = answers.wait(
        prompt_s, CHUNK_S, STEP_S, most_s, lambda wait_s: (1 + weight) * wait_s
    )
    assert cost == pytest.approx(min(options)[0])
    assert waits_s <= most_s
    assert any(cost == pytest.approx(a) and waits_s == pytest.approx(b) for a, b in options)


def test_an_answer_that_is_longer_than_anybody_knew_is_not_waited_for_in_vain():
    assert answers_of([One(20, 15)]).tokens_left == [5]
    assert answers_of([One(20, 20)]).tokens_left == answers_of([One(20, 999)]).tokens_left == [20]
    assert answers_of([One(0)]).tokens_left == [1]


def server(number: int, *under_way: One) -> Worker:
    made = Worker(number, f"http://x:{number + 1}")
    made.up(Hello(0, ["m"], 16, True, 64, step_tokens=1000))
    made.told(Load(step_s=STEP_S, token_s=CHUNK_S / 1000, row_s=1e-5))
    made.decoding = len(under_way)
    made.requests.update(under_way)
    return made


class Waits(msgspec.Struct, frozen=True):
    ask: Ask
    arrived_s: float = 0.0
    new_tokens: int = 1

    @property
    def keys(self):
        return NO_KEYS


def test_a_long_prompt_waits_for_a_short_answer_but_not_for_a_long_one_nor_for_ever():
    long, short = Ask(0, 20_000, 100, waited_s=0.0), Ask(0, 200, 100, waited_s=0.0)
    soon, never = ([server(at, One(tokens)) for at in range(2)] for tokens in (20, 900))

    def bound(ask, workers, now_s=0.0):
        return bind([Waits(ask)], workers, KeyIndex(), seconds, now_s)

    assert bound(long, soon) is None
    assert bound(short, soon) is not None
    assert bound(long, never) is not None
    assert bound(long, [soon[0], server(1)]).place == 1  # one where nobody answers
    # It has waited for twice as long as its prompt takes.
    assert bound(long, soon, 1.01) is not None
    at_once = msgspec.structs.replace(long, waited_s=float("inf"))
    assert bound(at_once, soon) is not None


@given(requests, st.integers(1, 40_000), st.integers(0, 5))
def test_requests_of_which_only_the_number_is_known_count_as_before(under_way, prompt, others):
    known = Candidate(
        running=len(under_way) + others, step_tokens=1000, answers=answers_of(under_way)
    )
    fewer = Candidate(running=len(under_way), step_tokens=1000, answers=answers_of(under_way))
    ask = Ask(0, prompt, 1)
    more_s = seconds(ask, [known])[0] - seconds(ask, [fewer])[0]
    assert more_s == pytest.approx(others * (prompt * known.token_s + known.row_s) / 2)
    assert wait_for_answers_s(ask, known) == 0.0  # it is sent now


def test_the_router_holds_a_long_stream_until_a_short_answer_beside_it_has_ended():
    async def check(url, servers, router):
        short = One(20)
        for worker in router.workers:
            worker.told = lambda load: None  # its speed stays as it is here
            worker.step_tokens, worker.step_s, worker.token_s = 100, 1e-3, 1e-3
            worker.requests.add(short)
            worker.decoding += 1
        later = asyncio.create_task(post(url, "abcd" * 2000, 3))
        while not router.waiting:
            await asyncio.sleep(0.005)
        assert [len(one.served) for one in servers] == [0, 0]
        router.workers[1].requests.discard(short)
        router.workers[1].decoding -= 1
        router.place_waiting()
        assert (await later)[0] == 200
        assert [len(one.served) for one in servers] == [0, 1]
        assert [len(one.requests) for one in router.workers] == [1, 0]
        router.workers[0].requests.discard(short)
        router.workers[0].decoding -= 1

    fleet(check, stuck_s=0)


def test_answers_without_anybody_cost_nothing():
    assert Answers([]).delay_s(1.0, CHUNK_S) == 0.0
    assert Answers([]).wait(1.0, CHUNK_S, STEP_S, 1.0, lambda wait_s: wait_s) == (0.0, 0.0)
