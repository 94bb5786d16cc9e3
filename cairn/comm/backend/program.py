"""One rank's part of a schedule, ready to run: its operations in one line.

The executor has one thread and never waits to send, so the threads of a rank (its channels) can be
put in one line: by step, and within a step what is sent before what is received. A receive then waits
only for a send of the same step, which its rank posts before it waits for anything of that step: no
cycle. `tests/comm/backend/test_program.py` runs every schedule that way.

Channels that share no slot are halves of the vector that go the same way, one behind the other:

    receive step 1 of a, send step 2 of a, receive step 1 of b, send step 2 of b, ...

so that b is on the wire while a is being added up, and a late wake-up does not leave the wire idle.

Also gather and scatter, which are too plain to have schedules. Pure: no torch, no bytes.
"""

import functools
from typing import NamedTuple

import numpy as np

from cairn.comm.backend.ordered_reduction import ordered_all_reduce, ordered_reduce_scatter
from cairn.comm.schedule.catalogue import make
from cairn.comm.schedule.ops import Collective, Kind, Schedule

ORDERED = "ordered"  # sums in the order of the ranks; see `ordered_reduction`


class Step(NamedTuple):
    kind: Kind
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
) -> Schedule:
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


def lower(schedule: Schedule, rank: int) -> Program:
    ops = schedule.ops
    mine = np.flatnonzero(ops.rank == rank)
    sends, step = ops.kind[mine] == int(Kind.SEND), ops.step[mine]
    if schedule.channels > 1 and (ops.after[mine] < 0).all():
        mine = mine[np.lexsort((mine, sends, ops.channel[mine], step - sends))]
    elif schedule.channels > 1:
        mine = mine[np.lexsort((mine, ~sends, step))]
    steps = tuple(
        Step(Kind(int(ops.kind[i])), int(ops.slot[i]), int(ops.peer[i]), int(ops.source[i]))
        for i in mine
    )
    written = frozenset(step.slot for step in steps if step.kind != Kind.SEND)
    return Program(schedule.name, schedule.chunks, schedule.slots, steps, written)


@functools.lru_cache(maxsize=256)
def gather_program(ranks: int, rank: int, root: int) -> Program:
    """Slot r is what rank r brings; the root receives them all."""
    others = [r for r in range(ranks) if r != root]
    if rank == root:
        steps = tuple(Step(Kind.RECV, other, other, -1) for other in others)
    else:
        steps = (Step(Kind.SEND, rank, root, -1),)
    return _straight("gather", ranks, steps)


@functools.lru_cache(maxsize=256)
def scatter_program(ranks: int, rank: int, root: int) -> Program:
    """Slot r is what rank r gets; the root sends them all."""
    others = [r for r in range(ranks) if r != root]
    if rank == root:
        steps = tuple(Step(Kind.SEND, other, other, -1) for other in others)
    else:
        steps = (Step(Kind.RECV, rank, root, -1),)
    return _straight("scatter", ranks, steps)


def _straight(name: str, ranks: int, steps: tuple[Step, ...]) -> Program:
    written = frozenset(step.slot for step in steps if step.kind != Kind.SEND)
    return Program(name, ranks, ranks, steps, written)
