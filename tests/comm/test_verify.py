"""What is wrong with a schedule is found and named; what is proved is right in every order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.comm.schedule.catalogue import make, names
from cairn.comm.schedule.interpret import interpret
from cairn.comm.schedule.ops import CollectiveSchedule, Op, OpKind, ScheduleError, schedule_of
from cairn.comm.schedule.verify import require, verify, verify_all

SEND, RECV, ADD, COPY = OpKind.SEND, OpKind.RECV, OpKind.RECV_REDUCE, OpKind.COPY


def two_ranks(*ops: Op, **shape) -> CollectiveSchedule:
    return schedule_of("by hand", "all_reduce", list(ops), ranks=2, chunks=1, **shape)


def test_a_schedule_by_hand_is_proved():
    exchange = two_ranks(
        Op(0, 0, SEND, 0, 1), Op(0, 0, ADD, 0, 1), Op(1, 0, SEND, 0, 0), Op(1, 0, ADD, 0, 0)
    )
    proof = require(exchange)
    assert (proof.steps, proof.traffic, proof.times_bound, proof.capacity) == (1, 1.0, 1.0, 1)
    assert [str(op) for op in exchange.program(0)] == ["send 0 -> 1", "recv_reduce 0 <- 1"]


@pytest.mark.parametrize(
    ("ops", "problem"),
    [
        ([Op(0, 0, SEND, 0, 1)], "`send 0 -> 1` of rank 0 is never received"),
        ([Op(1, 0, RECV, 0, 0)], "`recv 0 <- 0` of rank 1, which no rank sends"),
        ([Op(0, 0, SEND, 1, 1), Op(1, 0, RECV, 0, 0)], "reads a slot that holds nothing"),
        (
            [Op(0, 0, SEND, 0, 1), Op(1, 0, ADD, 0, 0)],
            r"rank 0 ends with the contributions of \[0\]",
        ),
        (
            [Op(0, 0, SEND, 0, 1), Op(0, 0, SEND, 0, 1), Op(1, 0, ADD, 0, 0), Op(1, 0, ADD, 0, 0)],
            "`recv_reduce 0 <- 0` of rank 1 counts a contribution twice",
        ),
        (
            [Op(0, 0, ADD, 0, 1), Op(0, 0, SEND, 0, 1), Op(1, 0, ADD, 0, 0), Op(1, 0, SEND, 0, 0)],
            "hangs with 64 chunk.*waits for its message",
        ),
        ([Op(0, 0, SEND, 0, 2)], "has no such peer"),
        ([Op(0, 0, SEND, 9, 1)], "has no such slot"),
        ([Op(0, 0, COPY, 1, source=7)], "has no such source"),
        ([Op(2, 0, SEND, 0, 1)], "has no such rank"),
    ],
)
def test_what_is_wrong_is_named(ops, problem):
    broken = two_ranks(*ops, slots=2)
    with pytest.raises(ScheduleError, match=problem):
        require(broken)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"slots": 3}, "3 slots, where all_to_all needs 8"),
        ({"chunks": 3}, "3 chunks cannot be shared evenly by 4 ranks"),
        ({"root": 4}, "rank 4 of 4 cannot be the root"),
        ({"nodes": 3}, "4 ranks on 3 nodes"),
        ({"chunks": 0}, "with 0 chunks"),
        ({"present": np.ones((2, 2), bool)}, "a map of blocks of shape"),
    ],
)
def test_numbers_that_cannot_be_a_collective_are_named(change, problem):
    broken = make("all_to_all", "pairwise", 4)._replace(**change)
    assert problem in (verify(broken).problem or "")


def test_two_chunks_in_the_wrong_place_are_told_apart():
    swapped = schedule_of(
        "swapped",
        "broadcast",
        [Op(0, 0, SEND, 0, 1), Op(0, 0, SEND, 1, 1), Op(1, 0, RECV, 1, 0), Op(1, 0, RECV, 0, 0)],
        ranks=2,
        chunks=2,
    )
    assert "ends with chunk 1 in slot 0" in (verify(swapped).problem or "")


def test_the_least_buffer_that_does_not_hang_is_found():
    """Both send three chunks before they receive any: each connection has to hold three."""
    both = [
        op
        for rank in (0, 1)
        for op in (
            *(Op(rank, 0, SEND, chunk, 1 - rank) for chunk in range(3)),
            *(Op(rank, 0, ADD, chunk, 1 - rank) for chunk in range(3)),
        )
    ]
    eager = schedule_of("eager", "all_reduce", both, ranks=2, chunks=3)
    assert "waits for room" in (verify(eager, capacity=2).problem or "")
    assert verify(eager, capacity=3).ok
    assert verify(eager).capacity == 4  # it tries powers of two
    with pytest.raises(ScheduleError, match="hangs"):
        interpret(eager, [np.ones(3)] * 2, capacity=2)


def test_channels_that_share_a_slot_must_say_who_goes_first():
    def tree(after: int) -> CollectiveSchedule:
        return two_ranks(
            Op(0, 0, ADD, 0, 1),
            Op(0, 1, SEND, 0, 1, after=after),
            Op(1, 0, SEND, 0, 0),
            Op(1, 1, RECV, 0, 0, after=2 if after >= 0 else -1),
        )

    assert verify(tree(after=0)).ok
    assert verify(tree(after=-1)).problem is not None
    detour = two_ranks(
        Op(0, 0, SEND, 0, 1),
        Op(0, 1, RECV, 0, 1),
        Op(1, 0, ADD, 0, 0),
        Op(1, 1, SEND, 0, 0, after=2),
    )
    assert "`recv 0 <- 1` of rank 0 races" in (verify(detour).problem or "")
    shipped = make("all_reduce", "tree", 9, chunks=6)
    assert verify(shipped).ok
    blind = shipped._replace(ops=shipped.ops._replace(after=np.full(shipped.operations, -1)))
    assert verify(blind).problem is not None


def test_one_bad_schedule_does_not_spoil_the_others():
    good, bad = make("all_reduce", "ring", 5), two_ranks(Op(0, 0, SEND, 0, 1))
    proofs = verify_all([good, bad, good, make("all_to_all", "bruck", 70)])
    assert [proof.ok for proof in proofs] == [True, False, True, True]


def mutated(schedule: CollectiveSchedule, op: int, field: str, value: int) -> CollectiveSchedule:
    column = getattr(schedule.ops, field).copy()
    column[op] = value
    return schedule._replace(ops=schedule.ops._replace(**{field: column}))


def without(schedule: CollectiveSchedule, op: int) -> CollectiveSchedule:
    ops = schedule.ops
    after = np.where(ops.after == op, -1, ops.after - (ops.after > op))
    return schedule._replace(
        ops=type(ops)(*(np.delete(column, op) for column in ops._replace(after=after)))
    )


def swapped(schedule: CollectiveSchedule, op: int) -> CollectiveSchedule:
    """Exchanges two neighbours of one thread."""
    order = np.arange(schedule.operations)
    order[[op, op + 1]] = op + 1, op
    return schedule._replace(ops=type(schedule.ops)(*(column[order] for column in schedule.ops)))


def is_right(schedule: CollectiveSchedule, seed: int) -> bool:
    """Whether real numbers come out right, in one order at random; powers of two do not collide."""
    rng = np.random.default_rng(seed)
    place = 1 + np.arange(schedule.chunks)
    inputs = [8**rank * place for rank in range(schedule.ranks)]
    try:
        got = interpret(schedule, inputs, turn=lambda k: int(rng.integers(k)))
    except ScheduleError:
        return False
    return all((vector == sum(inputs)).all() for vector in got)


SINGLE_CHANNEL = ["ring", "bruck", "pat", "two_shot", "two_level", "one_shot", "halving_doubling"]


@given(
    name=st.sampled_from([*SINGLE_CHANNEL, "tree"]),
    ranks=st.integers(2, 6),
    data=st.data(),
)
def test_the_verdict_on_a_damaged_schedule_is_that_of_real_numbers(name, ranks, data):
    schedule = make("all_reduce", name, ranks)
    op = data.draw(st.integers(0, schedule.operations - 2))
    match data.draw(st.sampled_from(["drop", "slot", "kind", "swap"])):
        case "drop":
            broken = without(schedule, op)
        case "slot":
            broken = mutated(schedule, op, "slot", data.draw(st.integers(0, schedule.slots - 1)))
        case "kind" if schedule.ops.kind[op] in (RECV, ADD):
            broken = mutated(
                schedule, op, "kind", data.draw(st.sampled_from([int(RECV), int(ADD)]))
            )
        case _ if (schedule.ops.rank[op], schedule.ops.channel[op]) == (
            schedule.ops.rank[op + 1],
            schedule.ops.channel[op + 1],
        ) and name != "tree":
            broken = swapped(schedule, op)
        case _:
            broken = schedule
    proof = verify(broken, capacity=1)
    runs = [is_right(broken, seed) for seed in range(3)]
    if proof.ok:
        assert all(runs)
    elif any(word in (proof.problem or "") for word in ("ends with", "hangs", "no rank sends")):
        assert not any(runs)


def test_every_shipped_schedule_rests_on_every_one_of_its_operations():
    """Nothing is superfluous: without any single operation none of them is proved."""
    for collective, name in names():
        schedule = make(collective, name, 4, chunks=2)
        proofs = verify_all(
            [without(schedule, op) for op in range(schedule.operations)], capacity=1
        )
        spare = [str(schedule.op(op)) for op, proof in enumerate(proofs) if proof.ok]
        assert (collective, name, spare) == (collective, name, [])
