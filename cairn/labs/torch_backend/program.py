"""Program of one rank: its operations of a schedule in execution order.

The executor has one thread and never waits to send, so the threads of a rank (its channels) can be
put in one line: by step, and within a step what is sent before what is received. A receive then waits
only for a send of the same step, which its rank posts before it waits for anything of that step: no
cycle. `tests/labs/torch_backend/test_program.py` runs every schedule that way.

Channels that share no slot are halves of the vector that go the same way, one behind the other:

    receive step 1 of a, send step 2 of a, receive step 1 of b, send step 2 of b, ...

so that b is on the wire while a is being added up, and a late wake-up does not leave the wire idle.

Also gather and scatter, which are too plain to have schedules. Pure: no torch, no bytes.
"""

import functools
from typing import NamedTuple

import numpy as np

from cairn.comm.schedule.algorithms import direct_gather
from cairn.comm.schedule.catalogue import make
from cairn.comm.schedule.ops import Collective, CollectiveSchedule, OpKind
from cairn.comm.schedule.plan import SchedulePlan

ORDERED = "ordered"  # sums in rank order, see `ordered_all_reduce`


class Step(NamedTuple):
    kind: OpKind
    slot: int
    peer: int  # -1 for what stays in the rank
    source: int  # slot that COPY and REDUCE read


class Program(NamedTuple):
    name: str
    chunks: int
    slots: int
    steps: tuple[Step, ...]
    written: frozenset[int]  # slots that this rank changes


@functools.lru_cache(maxsize=256)
def schedule_named(
    collective: Collective,
    name: str,
    ranks: int,
    root: int = 0,
    gpus: int | None = None,
    chunks: int = 4,
    parts: int = 1,
) -> CollectiveSchedule:
    if name == ORDERED:
        build = ordered_reduce_scatter if collective == "reduce_scatter" else ordered_all_reduce
        return build(ranks)
    return make(
        collective, name, ranks, root=root, gpus=gpus, chunks=chunks, parts=parts, channels=parts
    )


@functools.lru_cache(maxsize=1024)
def program_of(
    collective: Collective,
    name: str,
    ranks: int,
    rank: int,
    root: int = 0,
    gpus: int | None = None,
    chunks: int = 4,
    parts: int = 1,
) -> Program:
    return lower(schedule_named(collective, name, ranks, root, gpus, chunks, parts), rank)


def lower(schedule: CollectiveSchedule, rank: int) -> Program:
    ops = schedule.ops
    mine = np.flatnonzero(ops.rank == rank)
    sends, step = ops.kind[mine] == int(OpKind.SEND), ops.step[mine]
    if schedule.channels > 1 and (ops.after[mine] < 0).all():
        mine = mine[np.lexsort((mine, sends, ops.channel[mine], step - sends))]
    elif schedule.channels > 1:
        mine = mine[np.lexsort((mine, ~sends, step))]
    steps = tuple(
        Step(OpKind(int(ops.kind[i])), int(ops.slot[i]), int(ops.peer[i]), int(ops.source[i]))
        for i in mine
    )
    written = frozenset(step.slot for step in steps if step.kind != OpKind.SEND)
    return Program(schedule.name, schedule.chunks, schedule.slots, steps, written)


@functools.lru_cache(maxsize=256)
def gather_program(ranks: int, rank: int, root: int) -> Program:
    """Slot r is what rank r brings; the root receives them all."""
    others = [r for r in range(ranks) if r != root]
    if rank == root:
        steps = tuple(Step(OpKind.RECV, other, other, -1) for other in others)
    else:
        steps = (Step(OpKind.SEND, rank, root, -1),)
    return _straight("gather", ranks, steps)


@functools.lru_cache(maxsize=256)
def scatter_program(ranks: int, rank: int, root: int) -> Program:
    """Slot r is what rank r gets; the root sends them all."""
    others = [r for r in range(ranks) if r != root]
    if rank == root:
        steps = tuple(Step(OpKind.SEND, other, other, -1) for other in others)
    else:
        steps = (Step(OpKind.RECV, rank, root, -1),)
    return _straight("scatter", ranks, steps)


def _straight(name: str, ranks: int, steps: tuple[Step, ...]) -> Program:
    written = frozenset(step.slot for step in steps if step.kind != OpKind.SEND)
    return Program(name, ranks, ranks, steps, written)


def ordered_all_reduce(ranks: int) -> CollectiveSchedule:
    """All-reduce that sums in rank order, so that the bits of a sum do not depend on the size of the vector.

        owner of chunk c: rank c              1  each rank sends chunk c to its owner, into a slot of its own
        staging slots: one for each rank      2  the owner adds them: ((0 + 1) + 2) + ...
                                              3  the owner sends the sum to all ranks

    Other schedules give the same bits in every run, but their order of addition depends on the chunk and so on the
    vector's size. `one_shot` adds in rank order too. The cost: n - 1 chunks of staging, and the bytes of a ring.
    """
    plan = _sums(ranks).then(direct_gather(ranks))
    return plan.lower("ordered", "all_reduce", chunks=ranks, slots=2 * ranks)


def ordered_reduce_scatter(ranks: int) -> CollectiveSchedule:
    """Reduce-scatter in rank order: steps 1 and 2 of `ordered_all_reduce`."""
    return _sums(ranks).lower("ordered", "reduce_scatter", chunks=ranks, slots=2 * ranks)


def _sums(ranks: int) -> SchedulePlan:
    """Chunk r of all ranks added up at rank r; slot n + k holds what came from rank k."""
    plan = SchedulePlan(ranks)
    rank = np.arange(ranks)
    later = rank[1:]  # rank 0 begins with its own, where it already is
    plan.copy(later, later, to=ranks + later)
    here = rank[:, None]
    owner = (here + np.arange(1, ranks)) % ranks
    plan.send(here, owner, chunk=owner, to=ranks + here)
    plan.copy(later, ranks, to=later)
    for other in range(1, ranks):
        plan.send(rank, -1, ranks + other, to=rank, reduce=True)
    return plan
