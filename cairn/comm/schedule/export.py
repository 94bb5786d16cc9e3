"""A proved schedule for other programs: GOAL for network simulators, JSON for all others.

    Schedule --goal--> rank 0 {                                LogGOPSim, ATLAHS
                         l1: send 262144b to 1 tag 0 cpu 0
                         l2: recv 262144b from 3 tag 0 cpu 0
                         l3: send 262144b to 1 tag 1 cpu 0
                         l3 requires l2
    Schedule --document--> rank, channel and operations, with slots   --schedule_from--> the same schedule

In GOAL the chunks between two ranks in one step are one message, as in a proof: a simulator that counts waits counts
as many. A send lets its thread go on at once, since a proof holds for connections that have room for it (`irequires`:
begun is enough); a channel is a cpu of its rank; sums and copies take time only if their speed is given.
A teaching proof for those who have such a simulator (`cairn comm export`); nothing else reads it. Pure: knows no file
and no simulator.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cairn.comm.schedule.ops import (
    COLLECTIVES,
    CollectiveSchedule,
    Op,
    OpColumns,
    OpKind,
    ScheduleError,
    schedule_of,
)

VERSION = 1
MOST_PLACES = 1 << 30  # slots of all nodes, times ranks: a bit each in a proof
MOST_NUMBER = 1 << 24  # a channel, a slot or a step in a file
MOST_SEEN = 1 << 27  # operations times channels: a number each in a proof
MOST_CPUS = 256  # GOAL keeps a byte for it


class WrittenOperation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An operation of a document. `after` is an index into all operations of the document, in their order."""

    kind: str
    slot: int
    peer: int = -1
    source: int = -1
    after: int = -1
    step: int = 0


class ThreadDocument(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    channel: int
    operations: list[WrittenOperation]


class ScheduleDocument(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    name: str
    collective: str
    ranks: int
    nodes: int
    chunks: int
    slots: int
    root: int
    bytes: int  # of the whole vector
    chunk_bytes: int
    threads: list[ThreadDocument]
    present: list[str] | None = None  # block-sparse: a row of 0 and 1 for each rank


class _StepOperations(NamedTuple):
    """The operations of one thread in one step."""

    sends: dict[int, list[int]]  # operations by peer: one message each
    receives: dict[int, list[int]]
    local: list[int]


def document(schedule: CollectiveSchedule, size: int) -> ScheduleDocument:
    """Every operation as it stands in its thread; threads in the order of ranks and channels."""
    each = chunk_bytes(schedule, size)
    threads = [
        ThreadDocument(
            rank=rank, channel=channel, operations=[_written(schedule.op(i)) for i in which]
        )
        for (rank, channel), which in _threads(schedule).items()
    ]
    return ScheduleDocument(
        version=VERSION,
        name=schedule.name,
        collective=schedule.collective,
        ranks=schedule.ranks,
        nodes=schedule.nodes,
        chunks=schedule.chunks,
        slots=schedule.slots,
        root=schedule.root,
        bytes=size,
        chunk_bytes=each,
        threads=threads,
        present=_rows(schedule.present),
    )


def schedule_from(text: bytes | str) -> CollectiveSchedule:
    """The schedule of a document, ready to be proved: it may come from elsewhere."""
    try:
        document = msgspec.json.decode(text, type=ScheduleDocument)
        ops = [
            Op(
                thread.rank,
                thread.channel,
                OpKind[one.kind.upper()],
                one.slot,
                one.peer,
                one.source,
                one.after,
                one.step,
            )
            for thread in document.threads
            for one in thread.operations
        ]
        if any(not -1 <= op.after < len(ops) for op in ops):
            raise ValueError("an operation waits for one that is not there")
        if far := next((op for op in ops if not _in_range(op)), None):
            raise ValueError(f"`{far}` of rank {far.rank} has a number out of range")
        if len(ops) * (max((op.channel for op in ops), default=0) + 1) > MOST_SEEN:
            raise ValueError("its channels are too many to prove")
        if document.version != VERSION:
            raise ValueError(f"version {document.version}")
        if document.collective not in COLLECTIVES:
            raise ValueError(f"no collective '{document.collective}'")
        places = max(document.nodes, 1) * max(document.slots, 1) * max(document.ranks, 1)
        if places > MOST_PLACES:
            raise ValueError(
                f"{document.nodes} nodes with {document.slots} slots are too many to prove"
            )
        present = _map(document.present)
    except (msgspec.DecodeError, KeyError, ValueError) as error:
        raise ScheduleError(
            f"this is no schedule: {error}", hint=f"`cairn comm export --format json`, {VERSION=}"
        ) from None
    schedule = schedule_of(
        document.name,
        document.collective,
        ops,
        ranks=document.ranks,
        chunks=document.chunks,
        slots=document.slots,  # pyrefly: ignore
        nodes=document.nodes,
        root=document.root,
    )
    return schedule._replace(present=present)


def chunk_bytes(schedule: CollectiveSchedule, size: int) -> int:
    if size < 1:
        raise ScheduleError(f"a vector of {size} bytes", hint="it has one or more")
    return -(-size // schedule.chunks)


def goal(schedule: CollectiveSchedule, size: int, gb_per_s: float = 0.0) -> Iterator[str]:
    """Lines of GOAL. `gb_per_s`: how fast a rank adds and copies; 0: that takes no time."""
    each = chunk_bytes(schedule, size)
    if gb_per_s < 0:
        raise ScheduleError(f"sums at {gb_per_s} GB/s", hint="a rate, or 0 for no time at all")
    if schedule.channels > MOST_CPUS:
        raise ScheduleError(f"{schedule.channels} channels", hint=f"GOAL has {MOST_CPUS} cpus")
    ns = each / gb_per_s if gb_per_s else 0.0  # of one chunk
    by_rank: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for (rank, channel), which in _threads(schedule).items():
        by_rank[rank].append((channel, which))
    yield f"num_ranks {schedule.nodes}"
    for rank in range(schedule.nodes):
        yield ""
        yield f"rank {rank} {{"
        writer = _Writer(schedule, each, ns)
        for channel, which in by_rank[rank]:
            writer.thread(channel, which)
        yield from writer.lines
        yield from writer.later()
        yield "}"


class _Writer:
    """The lines of one rank."""

    def __init__(self, schedule: CollectiveSchedule, each: int, ns: float) -> None:
        self._schedule, self._each, self._ns = schedule, each, ns
        self.lines: list[str] = []
        self._label: dict[int, str] = {}  # of each operation
        self._count = 0

    def thread(self, channel: int, which: list[int]) -> None:
        ready: list[str] = []  # "requires l4": what the next step waits for
        for step, part in _parts(self._schedule.ops, which):
            tag = f"tag {step * self._schedule.channels + channel} cpu {channel}"
            last = ""
            for peer, ops in part.sends.items():
                last = self._line(f"send {len(ops) * self._each}b to {peer} {tag}", ops, ready)
            received = [
                self._received(peer, ops, tag, channel, ready)
                for peer, ops in part.receives.items()
            ]
            if part.local:
                waits = ready + [f"requires {label}" for label in received]
                received = [self._calc(part.local, channel, waits)]
            if received:
                ready = [f"requires {label}" for label in received]
            if last:
                ready = [*ready, f"irequires {last}"]

    def later(self) -> Iterator[str]:
        """Waits between channels, once every label is known."""
        ops = self._schedule.ops
        for index, label in self._label.items():
            after = int(ops.after[index])
            if after >= 0:
                is_send = ops.kind[after] == int(OpKind.SEND)
                yield f"{label} {'irequires' if is_send else 'requires'} {self._label[after]}"

    def _received(self, peer: int, ops: list[int], tag: str, channel: int, ready: list[str]) -> str:
        label = self._line(f"recv {len(ops) * self._each}b from {peer} {tag}", ops, ready)
        kinds = self._schedule.ops.kind
        sums = [index for index in ops if kinds[index] == int(OpKind.RECV_REDUCE)]
        return self._calc(sums, channel, [f"requires {label}"]) if sums and self._ns else label

    def _calc(self, ops: list[int], channel: int, waits: Iterable[str]) -> str:
        return self._line(f"calc {round(len(ops) * self._ns)} cpu {channel}", ops, waits)

    def _line(self, words: str, ops: list[int], waits: Iterable[str]) -> str:
        self._count += 1
        label = f"l{self._count}"
        self.lines.append(f"{label}: {words}")
        self.lines += [f"{label} {wait}" for wait in waits]
        self._label.update(dict.fromkeys(ops, label))
        return label


def _threads(schedule: CollectiveSchedule) -> dict[tuple[int, int], list[int]]:
    threads: dict[tuple[int, int], list[int]] = defaultdict(list)
    ranks, channels = schedule.ops.rank.tolist(), schedule.ops.channel.tolist()
    for index, place in enumerate(zip(ranks, channels, strict=True)):
        threads[place].append(index)
    return threads


def _parts(ops: OpColumns, which: list[int]) -> Iterator[tuple[int, _StepOperations]]:
    """Step by step, in order: what is sent, what is received, what is done within the rank."""
    steps: dict[int, _StepOperations] = {}
    for index in which:
        part = steps.setdefault(
            int(ops.step[index]), _StepOperations(defaultdict(list), defaultdict(list), [])
        )
        kind, peer = OpKind(int(ops.kind[index])), int(ops.peer[index])
        if kind is OpKind.SEND:
            part.sends[peer].append(index)
        elif kind in (OpKind.RECV, OpKind.RECV_REDUCE):
            part.receives[peer].append(index)
        else:
            part.local.append(index)
    yield from steps.items()


def _in_range(op: Op) -> bool:
    numbers = (op.rank, op.channel, op.slot, op.peer, op.source)
    return 0 <= op.step < MOST_NUMBER and all(-1 <= one < MOST_NUMBER for one in numbers)


def _rows(present: np.ndarray | None) -> list[str] | None:
    return None if present is None else ["".join("01"[int(one)] for one in row) for row in present]


def _map(rows: list[str] | None) -> np.ndarray | None:
    return None if rows is None else np.array([[int(one) for one in row] for row in rows], bool)


def _written(op: Op) -> WrittenOperation:
    values: dict[str, Any] = op._asdict()
    for name in ("rank", "channel", "kind"):
        values.pop(name)
    return WrittenOperation(kind=op.kind.name.lower(), **values)
