"""Operations of collective schedules.

A schedule is a program for each thread; a thread is one channel of one rank and runs in order:

    rank 0, channel 0:  send 0 -> 1    recv_reduce 2 <- 2    send 2 -> 1    ...
    rank 1, channel 0:  send 1 -> 2    recv_reduce 0 <- 0    ...

Each rank has one buffer of `slots`, a slot holds one chunk. Between two ranks there is a first-in,
first-out connection for each channel: the k-th send meets the k-th receive. A send waits only while
the connection is full. Threads of one rank share the buffer, and what one must not do before
another is written in `after`: one operation at most, as in MSCCL; threads are in order, so one
thread needs no more, and a wait for two others is an operation of its own.

Operations are kept as columns, because proofs run over hundreds of thousands of them; `program`
gives the readable form. Knows no collective and no bytes.
"""

from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np

from cairn.core.errors import CairnError

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"
]
COLLECTIVES: tuple[Collective, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
)
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
Column = np.ndarray  # int64, one entry for each operation


class ScheduleError(CairnError):
    """A schedule that cannot be built as asked, or that does not do what it says."""


class OpKind(IntEnum):
    SEND = 0  # read slot, give it to peer
    RECV = 1  # take from peer, overwrite slot
    RECV_REDUCE = 2  # take from peer, reduce into slot
    COPY = 3  # slot = source
    REDUCE = 4  # slot = slot (+) source


class Op(NamedTuple):
    """Readable form of an operation."""

    rank: int
    channel: int
    kind: OpKind
    slot: int  # read by SEND, written by all others
    peer: int = -1  # the other rank of SEND and RECV
    source: int = -1  # the slot that COPY and REDUCE read
    after: int = -1  # index of the operation of this rank that must be done before; -1: none
    step: int = 0  # chunks between two ranks in one step travel as one message

    def __str__(self) -> str:
        name = self.kind.name.lower()
        other = {
            OpKind.SEND: f"-> {self.peer}",
            OpKind.RECV: f"<- {self.peer}",
            OpKind.RECV_REDUCE: f"<- {self.peer}",
        }.get(self.kind, f"= {self.source}")
        return f"{name} {self.slot} {other}"


class OpColumns(NamedTuple):
    """All operations, ordered by (rank, channel, place in the thread)."""

    kind: Column
    rank: Column
    channel: Column
    slot: Column
    peer: Column
    source: Column
    after: Column
    step: Column


class CollectiveSchedule(NamedTuple):
    name: str
    collective: Collective
    ranks: int  # that contribute and want the result
    nodes: int  # ranks, and helpers such as an aggregator after them
    chunks: int  # the whole vector has this many, of equal size
    slots: int  # of each rank's buffer: input, output, staging
    ops: OpColumns
    root: int = 0  # of broadcast and reduce
    # Block-sparse only: [ranks, chunks], where a rank has something else than zeros.
    present: np.ndarray | None = None

    @property
    def operations(self) -> int:
        """Number of operations of all threads."""
        return len(self.ops.kind)

    def op(self, index: int) -> Op:
        """The readable form of one operation."""
        columns = self.ops
        return Op(
            rank=int(columns.rank[index]),
            channel=int(columns.channel[index]),
            kind=OpKind(int(columns.kind[index])),
            slot=int(columns.slot[index]),
            peer=int(columns.peer[index]),
            source=int(columns.source[index]),
            after=int(columns.after[index]),
            step=int(columns.step[index]),
        )

    def program(self, rank: int, channel: int = 0) -> list[Op]:
        """The operations of one thread, in order."""
        mine = (self.ops.rank == rank) & (self.ops.channel == channel)
        return [self.op(int(index)) for index in np.flatnonzero(mine)]

    @property
    def channels(self) -> int:
        return int(self.ops.channel.max()) + 1 if self.operations else 1


def schedule_of(
    name: str,
    collective: Collective,
    ops: list[Op],
    *,
    ranks: int,
    chunks: int,
    slots: int | None = None,
    nodes: int | None = None,
    root: int = 0,
) -> CollectiveSchedule:
    """A schedule written by hand; the operations of a thread stand in its order.

    `after` counts in the order of `ops` as given here.
    """
    order = sorted(range(len(ops)), key=lambda i: (ops[i].rank, ops[i].channel))
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    rows = [ops[i]._replace(after=place[ops[i].after]) for i in order]
    columns = OpColumns(
        *(
            np.array([int(getattr(row, field)) for row in rows], dtype=np.int64)
            for field in OpColumns._fields
        )
    )
    return CollectiveSchedule(
        name=name,
        collective=collective,
        ranks=ranks,
        nodes=nodes or ranks,
        chunks=chunks,
        slots=slots or chunks,
        ops=columns,
        root=root,
    )
