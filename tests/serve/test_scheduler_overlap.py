"""Steps ahead of the host, aborts, ends: what the scheduler decides before it knows, and what it makes of it then."""

import pytest
from checked_scheduler import CheckedScheduler
from fake_device import EOS
from scheduling import added, ids, limits, make, small, turn

from cairn.serve.engine.block_manager import IntegrityError
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.scheduler import Scheduler

# -- ahead of the host ------------------------------------------------------------------------------------


def test_the_next_step_is_scheduled_before_the_token_is_known():
    scheduler = Scheduler(limits())
    (request,) = added(scheduler, make(1, prompt=4))
    first, second = scheduler.schedule(), scheduler.schedule()
    (chunk,) = second.chunks
    assert (chunk.start, chunk.count, chunk.samples) == (4, 1, True)
    assert (request.pending, request.outputs, scheduler.in_flight) == (2, [], 2)
    scheduler.update(first, [5])
    assert (request.pending, request.outputs) == (1, [5])
    scheduler.update(second, [6])
    assert (request.pending, request.outputs) == (0, [5, 6])


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_nothing_is_scheduled_beyond_max_tokens(max_tokens):
    scheduler = Scheduler(limits())
    (request,) = added(scheduler, make(1, max_tokens=max_tokens))
    steps = [scheduler.schedule() for _ in range(5)]
    assert [len(step.chunks) for step in steps] == [1] * max_tokens + [0] * (5 - max_tokens)
    for step in steps:
        scheduler.update(step, [5] * len(step.sampling))
    assert (len(request.outputs), request.finish) == (max_tokens, "length")
    assert not scheduler.has_work


def test_a_stop_that_is_seen_late_drops_the_extra_token():
    scheduler = Scheduler(limits(rows=1))
    one, two = added(scheduler, make(1), make(2))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [advance.finished for advance in scheduler.update(first, [EOS])] == [True]
    assert one.outputs == [EOS]
    third = scheduler.schedule()  # the row is free at once, while the second step may still run
    assert ids(third) == [2]
    assert two.row == 0
    assert scheduler.update(second, [6]) == []
    assert one.outputs == [EOS]
    assert two.outputs == []
    scheduler.queues.check_integrity()


def test_a_request_preempted_in_flight_still_gets_its_token():
    scheduler = Scheduler(small())
    one, two = added(scheduler, make(1, prompt=8), make(2, prompt=8))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert second.preempted == [two]
    assert two.pending == 1
    scheduler.abort(1)
    third = scheduler.schedule()
    assert third.chunks == []  # two cannot come back before its token is known
    advances = scheduler.update(first, [5, 6])
    assert [(advance.request, advance.tokens) for advance in advances] == [(two, (6,))]
    assert two.outputs == [6]
    fourth = scheduler.schedule()
    (chunk,) = fourth.chunks
    assert chunk.request is two
    assert chunk.start + chunk.count == 9
    scheduler.update(second, [7])
    scheduler.update(fourth, [8])
    assert two.outputs == [6, 8]
    assert one.outputs == []


def test_a_preempted_request_may_finish_while_it_waits():
    scheduler = Scheduler(small())
    _one, two = added(scheduler, make(1, prompt=8), make(2, prompt=8))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.preempted == [two]
    scheduler.update(first, [5, EOS])
    assert (two.finish, two.outputs) == ("stop", [EOS])
    assert scheduler.waiting == 0
    scheduler.queues.check_integrity()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_memory_pressure_with_tokens_in_flight_loses_and_repeats_nothing(depth):
    engine = CheckedScheduler(limits(rows=4, pages=12, page_size=2, context=40, vocabulary=500))
    for n in range(12):
        engine.add([n + 1, 2, 3], SamplingParams(max_tokens=15, ignore_eos=True))
    engine.drain(depth)
    assert engine.seen["preempted"] > 3
    assert engine.seen["length"] == 12
    assert engine.seen["preempted in flight"] or depth == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("turns", range(8))
def test_an_abort_is_fine_at_any_moment(turns, depth):
    engine = CheckedScheduler(limits(step_tokens=8, rows=2, page_size=4, vocabulary=50))
    requests = [engine.add([n + 1] * 20, SamplingParams(max_tokens=6)) for n in range(3)]
    for _ in range(turns):
        engine.run(depth)
    for request in requests:
        if request is not None and request.state != "finished":
            engine.abort(request)
            engine.check()
    engine.drain(depth)


def test_aborting_the_unknown_and_ending_with_a_reason():
    scheduler = Scheduler(limits())
    assert scheduler.abort("nobody") is None
    added(scheduler, make(1))
    request = scheduler.abort(1, "stop", stop_reason="\n\n")
    assert request is not None
    assert (request.finish, request.stop_reason) == ("stop", "\n\n")
    assert scheduler.abort(1) is None


def test_steps_are_updated_once_in_order_and_whole():
    scheduler = Scheduler(limits())
    added(scheduler, make(1), make(2))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(ValueError, match="step 1 was updated, the next in flight is 0"):
        scheduler.update(second, [1, 2])
    with pytest.raises(ValueError, match="step 0 samples 2 tokens, not 1"):
        scheduler.update(first, [1])
    scheduler.update(first, [1, 2])
    with pytest.raises(ValueError, match="next in flight is 1"):
        scheduler.update(first, [1, 2])


# -- when a request is done ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "tokens", "outputs", "finish", "reason"),
    [
        ({}, [5, EOS], 2, "stop", None),
        ({"ignore_eos": True}, [5, EOS, 6], 3, None, None),
        ({"stop_token_ids": [8]}, [5, 8], 2, "stop", 8),
        ({"stop_token_ids": [8], "ignore_eos": True}, [EOS, 8], 2, "stop", 8),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [5, EOS], 2, "stop", EOS),
        ({"max_tokens": 3}, [5, 6, 7], 3, "length", None),
        ({"max_tokens": 2}, [5, EOS], 2, "stop", None),  # both at once: it did stop
        ({"min_tokens": 3}, [EOS, EOS, 5, EOS], 4, "stop", None),
        ({"min_tokens": 3}, [EOS, EOS, EOS], 3, "stop", None),
        ({"min_tokens": 2, "stop_token_ids": [8]}, [8, 8], 2, "stop", 8),
        ({"min_tokens": 3, "max_tokens": 3}, [8, EOS, 5], 3, "length", None),
    ],
)
def test_stopping(params, tokens, outputs, finish, reason):
    scheduler = Scheduler(limits())
    (request,) = added(scheduler, make(1, **params))
    for token in tokens:
        assert request.finish is None
        turn(scheduler, token)
    assert len(request.outputs) == outputs
    assert (request.finish, request.stop_reason) == (finish, reason)
    assert scheduler.has_work == (finish is None)


def test_without_max_tokens_the_context_is_the_end():
    scheduler = Scheduler(limits(context=20))
    (request,) = added(scheduler, make(1, prompt=12, max_tokens=None))
    while scheduler.has_work:
        turn(scheduler)
    assert (len(request.outputs), request.finish) == (8, "length")


# -- afterwards -------------------------------------------------------------------------------------------------


def test_nothing_is_left_when_everybody_is_gone():
    engine = CheckedScheduler(limits(rows=4, pages=40, page_size=4, context=64, vocabulary=50))
    for n in range(40):
        engine.add([n + 1] * (1 + n % 9), SamplingParams(max_tokens=1 + n % 13))
    engine.drain(depth=1)
    scheduler = engine.scheduler
    assert (scheduler.requests, scheduler.queues.running) == ({}, [])
    assert sorted(scheduler.queues.free_rows) == list(range(4))
    assert scheduler.blocks._tables == {}
    assert (scheduler.in_flight, scheduler.has_work) == (0, False)


def test_the_same_calls_give_the_same_decisions():
    """Ranks of a tensor-parallel group schedule for themselves and have to agree."""

    def history() -> list[tuple]:
        engine = CheckedScheduler(limits(rows=3, pages=12, page_size=2, context=40, vocabulary=50))
        for n in range(10):
            engine.add([n % 3 + 1] * (n % 4 + 1), SamplingParams(max_tokens=12), priority=n % 2)
        taken = []
        while engine.alive:
            step = engine.schedule()
            taken.append(
                [
                    (c.request.id, c.request.row, c.start, c.count, tuple(c.pages))
                    for c in step.chunks
                ]
            )
            while engine.in_flight:
                engine.update()
        return taken

    assert history() == history()


def test_damage_is_noticed():
    def broken(damage) -> None:
        scheduler = Scheduler(limits())
        added(scheduler, make(1), make(2), make(3))
        scheduler.schedule()
        added(scheduler, make(4))
        damage(scheduler)
        with pytest.raises(IntegrityError):
            scheduler.queues.check_integrity()

    broken(lambda scheduler: scheduler.queues.free_rows.append(0))
    broken(lambda scheduler: scheduler.queues.running.reverse())
    broken(lambda scheduler: scheduler.queues.running.pop())
    broken(lambda scheduler: setattr(scheduler.queues.running[0], "computed", 999))
    broken(lambda scheduler: setattr(scheduler.queues.running[0], "state", "finished"))
    broken(lambda scheduler: setattr(scheduler.queues.waiting.head, "row", 3))
    broken(lambda scheduler: scheduler.queues.waiting.pop())
    broken(lambda scheduler: scheduler.requests.pop(1))
