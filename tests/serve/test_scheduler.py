"""Who runs, in which step, with how many tokens: the cases that serving engines have got wrong before."""

from types import SimpleNamespace

import pytest
from checked_scheduler import CheckedScheduler
from fake_device import EOS
from scheduling import added, counts, ids, limits, make, small, turn

from cairn.core.errors import RequestError
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.tiers.load_plan import Loading

# -- one budget for everything -----------------------------------------------------------------------


def test_a_prompt_is_one_chunk_and_then_one_token_a_step():
    scheduler = Scheduler(limits())
    (request,) = added(scheduler, make(1, prompt=20))
    first = scheduler.schedule()
    (chunk,) = first.chunks
    assert (chunk.start, chunk.count, chunk.samples) == (0, 20, True)
    assert (chunk.first_page, list(chunk.pages)) == (0, [1, 2])
    assert (request.computed, request.pending, request.row) == (20, 1, 0)
    assert first.admitted == [request]
    (advance,) = scheduler.update(first, [7])
    assert (advance.request, advance.tokens, advance.finished) == (request, (7,), False)
    (chunk,) = turn(scheduler).chunks
    assert (chunk.start, chunk.count, chunk.first_page, list(chunk.pages)) == (20, 1, 2, [])
    assert request.outputs == [7, 5]
    assert request.ledger.prefill_chunks == 1


def test_concurrent_partial_prefills_share_the_budget():
    scheduler = Scheduler(limits(step_tokens=1024, prefill_chunk=400))
    added(scheduler, *(make(n, prompt=800) for n in range(3)))
    assert [counts(turn(scheduler)) for _ in range(3)] == [
        [400, 400, 224],
        [400, 400, 224],
        [1, 1, 352],
    ]


def test_decode_is_not_held_up_by_a_long_prompt():
    scheduler = Scheduler(limits(step_tokens=64))
    added(scheduler, make(1), make(2))
    turn(scheduler)
    added(scheduler, make(3, prompt=200))
    assert counts(turn(scheduler)) == [1, 1, 62]
    assert counts(turn(scheduler)) == [1, 1, 62]


def prompt_beside_answers(priority: int, mixed: int = 0) -> tuple[Scheduler, Request]:
    """Four requests that decode, and one whose prompt of 2000 tokens comes before them in the order of the running."""
    scheduler = Scheduler(limits(step_tokens=64, mixed_step_tokens=mixed))
    prompt = make(9, prompt=2000, priority=priority)
    answers = [make(n, max_tokens=1000, priority=1) for n in range(4)]
    if priority == 0:
        added(scheduler, *answers)
        turn(scheduler)
        added(scheduler, prompt)
        turn(scheduler)  # new ones are admitted after those that run
        return scheduler, prompt
    loading = Loading(0, 1, 0.0)  # the others begin to decode while its first page is loaded
    scheduler.tiers = SimpleNamespace(begin=lambda request: setattr(request, "loading", loading))
    added(scheduler, prompt)
    turn(scheduler)
    scheduler.tiers = None
    added(scheduler, *answers)
    turn(scheduler)
    loading.state = "landed"
    return scheduler, prompt


@pytest.mark.parametrize("priority", [0, 1], ids=["urgent", "earlier"])
@pytest.mark.parametrize("mixed", [0, 16])
def test_a_prompt_that_comes_first_leaves_each_answer_its_token(priority, mixed):
    scheduler, prompt = prompt_beside_answers(priority, mixed)
    while prompt.computed < 2000:
        step = turn(scheduler)
        assert ids(step) == [9, 0, 1, 2, 3]
        assert counts(step)[1:] == [1, 1, 1, 1]
        assert step.tokens == (mixed or 64) or prompt.computed == 2000


def test_answers_come_before_an_urgent_prompt_where_a_step_has_room_for_no_more():
    """A budget below the number of rows; the engine's own limits have one token more than that."""
    scheduler = Scheduler(limits(step_tokens=3))
    added(scheduler, *(make(n, prompt=1, max_tokens=3, priority=1) for n in range(3)))
    turn(scheduler)
    (urgent,) = added(scheduler, make(9, prompt=4))
    assert [ids(turn(scheduler)) for _ in range(4)] == [[0, 1, 2], [0, 1, 2], [9], [9]]
    assert urgent.computed == 4


def test_a_step_is_smaller_where_somebody_would_wait():
    scheduler = Scheduler(limits(step_tokens=64, mixed_step_tokens=24))
    added(scheduler, make(1, prompt=100))
    assert [counts(turn(scheduler)) for _ in range(3)] == [[64], [36], [1]]  # nobody waits; alone
    added(scheduler, make(2, prompt=40))
    assert [counts(turn(scheduler)) for _ in range(3)] == [[1, 23], [1, 17], [1, 1]]


def test_an_unfinished_prompt_samples_nothing():
    scheduler = Scheduler(limits(step_tokens=8))
    (request,) = added(scheduler, make(1, prompt=20))
    steps = [turn(scheduler) for _ in range(3)]
    assert [len(step.sampling) for step in steps] == [0, 0, 1]
    assert [counts(step) for step in steps] == [[8], [8], [4]]
    # Its pages were all taken at admission, so that no prompt gets stuck half way.
    assert [len(step.chunks[0].pages) for step in steps] == [2, 0, 0]
    assert request.outputs == [5]
    assert request.ledger.prefill_chunks == 3


def test_rows_are_never_given_out_twice():
    scheduler = Scheduler(limits(rows=2))
    requests = added(scheduler, *(make(n, max_tokens=2) for n in range(5)))
    step = scheduler.schedule()
    assert (scheduler.running, scheduler.waiting) == (2, 3)
    assert [request.row for request in requests] == [0, 1, -1, -1, -1]
    scheduler.update(step, [5, 5])
    turn(scheduler)  # the last token of the first two
    assert [request.row for request in requests[:2]] == [-1, -1]
    turn(scheduler)
    assert [request.row for request in requests[2:]] == [0, 1, -1]
    assert scheduler.running == 2


def test_preempted_requests_do_not_keep_their_rows():
    """Paused requests must not count for rows, nor take one when they wait."""
    engine = CheckedScheduler(small())
    for n in range(3):
        engine.add([n + 1] * 4, SamplingParams(max_tokens=10, ignore_eos=True))
    while not engine.seen["preempted"]:
        engine.run()
    assert engine.scheduler.running < 3
    engine.check()
    engine.drain()


# -- the line ------------------------------------------------------------------------------------------


def test_nobody_overtakes_a_head_that_does_not_fit():
    scheduler = Scheduler(limits(pages=7, page_size=4))
    (running,) = added(scheduler, make(1, prompt=12))
    turn(scheduler)
    added(scheduler, make(2, prompt=16), make(3, prompt=2))
    for _ in range(3):
        assert ids(turn(scheduler)) == [1]  # 3 would fit, but 2 comes first
    scheduler.abort(running.id)
    assert ids(turn(scheduler)) == [2, 3]


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [1, 2, 3, 4]), ("shortest", [3, 2, 4, 1])])
def test_policies(policy, order):
    scheduler = Scheduler(limits(policy=policy))
    added(scheduler, make(1, prompt=40), make(2, prompt=20), make(3, prompt=4), make(4, prompt=20))
    assert ids(scheduler.schedule()) == order


def test_lower_priority_numbers_run_first_and_ties_go_by_arrival():
    scheduler = Scheduler(limits(rows=3))
    added(scheduler, make(1, priority=1), make(2), make(3, priority=-1), make(4))
    assert ids(turn(scheduler)) == [3, 2, 4]
    assert ids(turn(scheduler)) == [3, 2, 4]
    assert scheduler.waiting == 1


def test_an_urgent_request_does_not_preempt_while_there_is_space():
    scheduler = Scheduler(limits())
    added(scheduler, make(1, priority=5))
    turn(scheduler)
    added(scheduler, make(2, priority=0))
    step = turn(scheduler)
    assert step.preempted == []
    assert ids(step) == [1, 2]
    assert ids(turn(scheduler)) == [2, 1]  # from now on in the order of their priorities


# -- too little memory -----------------------------------------------------------------------------------


def test_the_newest_gives_its_pages_back_and_is_next_in_line():
    scheduler = Scheduler(small())
    _one, two = added(scheduler, make(1, prompt=8), make(2, prompt=8))
    turn(scheduler)
    added(scheduler, make(3))
    step = turn(scheduler)  # one needs a third page
    assert step.preempted == [two]
    assert ids(step) == [1]
    assert (two.state, two.row, two.blocks, two.computed) == ("waiting", -1, [], 0)
    assert two.outputs == [5]
    assert two.ledger.preemptions == 1
    assert scheduler.queues.waiting.head is two  # before 3, which came later
    scheduler.queues.check_integrity()


def test_nobody_is_admitted_in_a_step_that_preempted():
    scheduler = Scheduler(small())
    added(scheduler, make(1, prompt=8), make(2, prompt=8))
    turn(scheduler)
    added(scheduler, make(3, priority=-1))  # would fit into what the preempted one leaves
    assert ids(turn(scheduler)) == [1]
    assert ids(turn(scheduler)) == [1, 3]


def test_a_preempted_request_finds_its_own_pages_again():
    scheduler = Scheduler(small(pages=6))
    one, two = added(scheduler, make(1, prompt=8, max_tokens=6), make(2, prompt=8))
    turn(scheduler)  # 5 pages, 4 in use
    step = turn(scheduler)  # one takes the last, two needs another
    assert step.preempted == [two]
    scheduler.abort(1)
    step = turn(scheduler)
    (chunk,) = step.chunks
    assert (chunk.start, chunk.count) == (8, 1)  # two full pages of its prompt were still there
    assert two.outputs == [5, 5]
    assert two.cached == 0  # for the usage only the first admission counts
    assert scheduler.blocks.prefix.statistics.requests == 2
    assert one.finish == "abort"


def test_the_victim_is_the_least_urgent_and_of_those_the_newest():
    scheduler = Scheduler(small(pages=9))
    added(
        scheduler, make(1, prompt=8, priority=1), make(2, prompt=8), make(3, prompt=8, priority=1)
    )
    added(scheduler, make(4, prompt=8))
    turn(scheduler)
    step = turn(scheduler)
    # 3 gives two pages, for 2 and 4; 1 finds none, is now the last itself, and goes as well.
    assert [request.id for request in step.preempted] == [3, 1]
    assert ids(step) == [2, 4]
    assert list(scheduler.queues.waiting) == [step.preempted[1], step.preempted[0]]


def test_a_request_that_outgrows_the_cache_fails_alone_with_numbers():
    scheduler = Scheduler(small())
    (large,) = added(scheduler, make(1, prompt=10, max_tokens=50))
    for _ in range(7):  # entries for 16 tokens, and a 17th that has no room
        turn(scheduler)
    small_one = make(2)
    scheduler.add(small_one)
    step = scheduler.schedule()
    assert step.failed == [large]
    assert (large.finish, large.state) == ("error", "finished")
    assert large.error == (
        "10 prompt tokens and 7 outputs fill all 4 pages of 4 tokens that the cache has"
    )
    assert ids(step) == [2]  # the next one runs in the same step
    failed, fresh = scheduler.update(step, [5])
    assert (failed.request, failed.tokens, failed.finished) == (large, (), True)
    assert (fresh.request, fresh.tokens, fresh.finished) == (small_one, (5,), False)
    scheduler.queues.check_integrity()


def test_the_last_token_may_still_be_in_flight_when_the_cache_is_full():
    """A request at the edge of the cache is not failed before its stop token had a chance to arrive."""
    scheduler = Scheduler(small())
    (request,) = added(scheduler, make(1, prompt=16, max_tokens=50))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert (second.chunks, second.failed) == ([], [])
    (advance,) = scheduler.update(first, [EOS])
    assert advance.finished
    assert request.finish == "stop"
    assert not scheduler.has_work


def test_what_can_never_fit_is_refused_at_the_door():
    scheduler = Scheduler(small())
    with pytest.raises(RequestError, match="needs 5 pages of 4, the whole cache has 4"):
        scheduler.add(make(1, prompt=17, max_tokens=1))
    assert not scheduler.has_work
    scheduler.add(make(2))
    with pytest.raises(RequestError, match="request 2 is in the engine already"):
        scheduler.add(make(2))
    finished = scheduler.abort(2)
    assert finished is not None
    scheduler.add(make(2))  # the id is free again
    with pytest.raises(ValueError, match="added before"):
        scheduler.add(finished_again(finished))


def finished_again(request: Request) -> Request:
    request.id = 3
    return request


# -- the prefix cache -----------------------------------------------------------------------------------


def test_the_same_prompt_twice_in_one_step_is_computed_once():
    scheduler = Scheduler(limits())
    prompt = list(range(1, 101))
    one, two = added(scheduler, make(1, prompt), make(2, prompt))
    step = scheduler.schedule()
    assert counts(step) == [100, 100 % 16]
    assert two.blocks[:6] == one.blocks[:6]
    assert two.blocks[6] != one.blocks[6]
    assert (one.cached, two.cached) == (0, 96)
    assert list(step.chunks[1].pages) == two.blocks  # found ones included
    assert step.filled == [(one, one.blocks[:6])]


def test_the_next_turn_of_a_conversation_finds_what_was_generated():
    scheduler = Scheduler(limits())
    (first,) = added(scheduler, make(1, prompt=20, max_tokens=30))
    while scheduler.has_work:
        turn(scheduler)
    assert first.finish == "length"
    added(scheduler, make(2, [*first.prompt, *first.outputs, 7, 8]))
    (chunk,) = scheduler.schedule().chunks
    assert chunk.start == 48  # 49 of the 50 tokens have entries, 3 pages of 16 are full


def test_prefixes_are_not_shared_between_salts():
    scheduler = Scheduler(limits())
    prompt = list(range(1, 50))
    one = Request(1, prompt, SamplingParams(), salt="a")
    two = Request(2, prompt, SamplingParams(), salt="b")
    added(scheduler, one, two)
    assert counts(scheduler.schedule()) == [49, 49]
    assert set(one.blocks).isdisjoint(two.blocks)


def test_a_lost_step_takes_with_it_whoever_builds_upon_it():
    scheduler = Scheduler(limits(step_tokens=140))
    prompt = list(range(1, 101))
    one, two, bystander = added(scheduler, make(1, prompt), make(3, prompt=90), make(4))
    lost = scheduler.schedule()
    assert counts(lost) == [100, 40]
    (reader,) = added(scheduler, make(5, [*prompt[:64], 7]))
    following = scheduler.schedule()
    assert ids(following) == [1, 3, 4, 5]
    assert following.chunks[-1].start == 64
    ended = [advance.request for advance in scheduler.fail(lost, "device lost")]
    assert ended == [one, two, reader]
    assert {request.error for request in ended} == {"device lost"}
    scheduler.queues.check_integrity()
    assert bystander.state == "running"
    advances = scheduler.update(following, [9] * len(following.sampling))
    assert [advance.request for advance in advances] == [bystander]
    added(scheduler, make(6, prompt))
    step = scheduler.schedule()
    assert counts(step) == [1, 100]  # nothing of what was never written is found


@pytest.mark.parametrize("reader_is_gone", [False, True])
def test_a_page_that_a_lost_step_left_half_empty_is_not_kept(reader_is_gone):
    """The lost step filled no page, the one after it did: with a hole in it."""
    scheduler = Scheduler(limits(page_size=4, prefill_chunk=3))
    prompt = list(range(1, 13))
    (one,) = added(scheduler, make(1, prompt))
    lost = scheduler.schedule()
    assert lost.filled == []
    (reader,) = added(scheduler, make(2, [*prompt[:9], 99]))
    following = scheduler.schedule()
    assert following.filled == [(one, one.blocks[:1])]
    assert [chunk.start for chunk in following.chunks] == [3, 4]
    if reader_is_gone:
        scheduler.abort(2)
    ended = [advance.request for advance in scheduler.fail(lost, "device lost")]
    assert ended == ([one] if reader_is_gone else [one, reader])
    scheduler.update(following, [])
    added(scheduler, make(3, prompt))
    assert [chunk.start for chunk in scheduler.schedule().chunks] == [0]
