"""Plans: "in step s these ranks send these chunks", lowered to a schedule of operations.

Generators speak of transfers, for all ranks at once:

    ring = Plan(n)
    for step in range(n - 1):
        ring.send(rank, right, chunk=(rank - step) % n)      # arrays over the ranks

`lower` makes a send and a receive of each transfer and puts them in each thread's order: by step,
then by lane (the place of a chunk within its message), sends before receives. So an exchange of
many chunks goes send, receive, send, receive, and a connection that holds one chunk is enough.

Two facts make generators short. A gather run backwards, with every copy turned into a reduction, is
a reduce-scatter (`reversed`); and a reduce-scatter followed by a gather is an all-reduce (`then`).
Does not prove anything: `verify` does.
"""

from typing import NamedTuple

import numpy as np

from cairn.comm.schedule.ops import Collective, CollectiveSchedule, OpColumns, OpKind, ScheduleError

LOCAL = -1  # `target` of a transfer within a rank


class Transfers(NamedTuple):
    """Columns of equal length; `target` is LOCAL for a copy within `source`."""

    step: np.ndarray
    lane: np.ndarray
    channel: np.ndarray
    source: np.ndarray  # rank
    target: np.ndarray  # rank
    read: np.ndarray  # slot of source
    write: np.ndarray  # slot of target, or of source when local
    reduce: np.ndarray  # into what is there, or over it

    @property
    def total(self) -> int:
        return len(self.step)


class SchedulePlan:
    """Transfers in the making. Each `send` is one step, unless it says which."""

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ScheduleError(f"a collective of {ranks} ranks", hint="it needs at least one")
        self.ranks = ranks
        self.next_step = 0
        self._batches: list[Transfers] = []

    def send(
        self,
        source: np.ndarray | int,
        target: np.ndarray | int,
        chunk: np.ndarray | int,
        *,
        to: np.ndarray | int | None = None,
        reduce: bool = False,
        channel: np.ndarray | int = 0,
        step: np.ndarray | int | None = None,
    ) -> None:
        """Add a step in which every `source` sends its slot `chunk` to slot `to` (default: the same) of `target`.

        Arrays of one dimension run over ranks, of two over ranks and the chunks of one message.
        """
        step = self.next_step if step is None else step
        to = chunk if to is None else to
        fields = list(np.broadcast_arrays(step, 0, channel, source, target, chunk, to, reduce))
        if fields[0].size == 0:
            return
        lane = np.zeros(()) if fields[0].ndim < 2 else np.arange(fields[0].shape[1])
        fields[1] = np.broadcast_to(lane, fields[0].shape)
        batch = Transfers(*(np.ravel(field).astype(np.int64) for field in fields))
        self._batches.append(batch)
        self.next_step = max(self.next_step, int(batch.step.max()) + 1)

    def copy(self, rank: np.ndarray | int, chunk: np.ndarray | int, to: np.ndarray | int) -> None:
        """Add a step in which each rank copies a slot within its own buffer."""
        self.send(rank, LOCAL, chunk, to=to)

    def transfers(self) -> Transfers:
        empty = np.zeros(0, dtype=np.int64)
        if not self._batches:
            return Transfers(*([empty] * len(Transfers._fields)))
        return Transfers(*(np.concatenate(column) for column in zip(*self._batches, strict=True)))

    def then(self, later: "SchedulePlan") -> "SchedulePlan":
        """This, and then that."""
        both = SchedulePlan(self.ranks)
        moved = later.transfers()
        moved = moved._replace(step=moved.step + self.next_step)
        both._batches = [self.transfers(), moved]
        both.next_step = self.next_step + later.next_step
        return both

    def reversed(self) -> "SchedulePlan":
        """Backwards in time, with every copy a reduction: what was spread is collected."""
        back = SchedulePlan(self.ranks)
        ahead = self.transfers()
        if (ahead.target == LOCAL).any() or ahead.reduce.any():
            raise ScheduleError(
                "only a plan that copies between ranks can be run backwards",
                hint="reverse the gather before adding copies or reductions to it",
            )
        back._batches = [
            ahead._replace(
                step=self.next_step - 1 - ahead.step,
                source=ahead.target,
                target=ahead.source,
                read=ahead.write,
                write=ahead.read,
                reduce=np.ones_like(ahead.reduce),
            )
        ]
        back.next_step = self.next_step
        return back

    def split(self, parts: int, channels: int = 1) -> "SchedulePlan":
        """Every chunk becomes `parts` smaller ones, dealt out to the channels in turn."""
        if parts < 1 or channels < 1:
            raise ScheduleError(f"cannot split a chunk into {parts} parts on {channels} channels")
        if parts == 1:
            return self
        whole = self.transfers()
        part = np.tile(np.arange(parts), whole.total)
        repeated = Transfers(*(np.repeat(column, parts) for column in whole))
        per_channel = -(-parts // channels)
        used = int(whole.channel.max()) + 1 if whole.total else 1
        finer = SchedulePlan(self.ranks)
        finer._batches = [
            repeated._replace(
                lane=repeated.lane * per_channel + part // channels,
                channel=repeated.channel + used * (part % channels),
                read=repeated.read * parts + part,
                write=repeated.write * parts + part,
            )
        ]
        finer.next_step = self.next_step
        return finer

    def lower(
        self,
        name: str,
        collective: Collective,
        *,
        chunks: int,
        slots: int | None = None,
        nodes: int | None = None,
        root: int = 0,
        present: np.ndarray | None = None,
    ) -> CollectiveSchedule:
        """The schedule: a send and a receive for each transfer, in the order of every thread."""
        ops = _order(*_halves(self.transfers()))
        return CollectiveSchedule(
            name=name,
            collective=collective,
            ranks=self.ranks,
            nodes=nodes or self.ranks,
            chunks=chunks,
            slots=slots or chunks,
            ops=ops,
            root=root,
            present=present,
        )


def _halves(moves: Transfers) -> tuple[OpColumns, np.ndarray]:
    """The sending and the receiving halves, and the lane of each."""
    local = moves.target == LOCAL
    away = Transfers(*(column[~local] for column in moves))
    home = Transfers(*(column[local] for column in moves))
    none, none_home = np.full(away.total, -1), np.full(home.total, -1)
    sends = OpColumns(
        np.full(away.total, int(OpKind.SEND)),
        away.source,
        away.channel,
        away.read,
        away.target,
        none,
        none,
        away.step,
    )
    kind = np.where(away.reduce == 1, int(OpKind.RECV_REDUCE), int(OpKind.RECV))
    receives = OpColumns(
        kind, away.target, away.channel, away.write, away.source, none, none, away.step
    )
    kind = np.where(home.reduce == 1, int(OpKind.REDUCE), int(OpKind.COPY))
    copies = OpColumns(
        kind, home.source, home.channel, home.write, none_home, home.read, none_home, home.step
    )
    joined = OpColumns(*(np.concatenate(x) for x in zip(sends, receives, copies, strict=True)))
    return joined, np.concatenate([away.lane, away.lane, home.lane])


def _order(ops: OpColumns, lane: np.ndarray) -> OpColumns:
    """Sort operations by thread, step and lane, with sends before receives."""
    side = ops.kind != int(OpKind.SEND)
    order = np.lexsort((side, lane, ops.step, ops.channel, ops.rank))
    ops = OpColumns(*(column[order] for column in ops))
    if len(ops.kind) and ops.channel.max() > 0:
        ops = ops._replace(after=_waits(ops, lane[order]))
    return ops


def _waits(ops: OpColumns, lane: np.ndarray) -> np.ndarray:
    """The last earlier operation of another channel that accesses the slot of each operation."""
    count = len(ops.kind)
    local = ops.source >= 0
    index = np.concatenate([np.arange(count), np.flatnonzero(local)])
    slot = np.concatenate([ops.slot, ops.source[local]])
    side = (ops.kind != int(OpKind.SEND))[index]
    order = np.lexsort((side, lane[index], ops.step[index], slot, ops.rank[index]))
    index, slot = index[order], slot[order]
    same = (ops.rank[index][1:] == ops.rank[index][:-1]) & (slot[1:] == slot[:-1])
    crossing = same & (ops.channel[index][1:] != ops.channel[index][:-1])
    after = np.full(count, -1)
    waiting, awaited = index[1:][crossing], index[:-1][crossing]
    after[waiting] = awaited
    if (after[waiting] != awaited).any():
        raise ScheduleError("an operation would wait for two channels", hint="copy on one channel")
    return after
