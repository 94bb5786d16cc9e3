"""A schedule run on real arrays, one operation at a time: the plain form of an executor.

    inputs, one array for each rank  -->  outputs, one array for each rank

Threads take turns in an order that `turn` chooses, connections hold `capacity` chunks. The result
does not depend on the order, bit for bit, because every reduction stands at a fixed place in its
thread: that is what a test shows with orders at random, and what makes a schedule deterministic.
Written without a glance at `verify`, so that each is the other's oracle.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from cairn.comm.schedule.ops import CollectiveSchedule, Op, OpKind, ScheduleError

Reduction = Literal["sum", "product", "min", "max"]
REDUCTIONS: dict[Reduction, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
Turn = Callable[[int], int]  # of so many threads, which one goes, or the next that can


def interpret(
    schedule: CollectiveSchedule,
    inputs: Sequence[np.ndarray],
    reduction: Reduction = "sum",
    capacity: int = 1,
    turn: Turn = lambda threads: 0,
) -> list[np.ndarray]:
    """Execute a schedule and return the final vector of each rank. Vectors are padded to whole chunks with zeros."""
    size = _common_size(schedule, inputs)
    chunk = -(-size // schedule.chunks)
    buffers = [_buffer(schedule, vector, chunk, rank) for rank, vector in enumerate(inputs)]
    helpers = schedule.nodes - schedule.ranks
    buffers += [np.zeros((schedule.slots, chunk), inputs[0].dtype) for _ in range(helpers)]
    _run(schedule, buffers, REDUCTIONS[reduction], capacity, turn)
    return [_output(schedule, buffers[rank], rank, size) for rank in range(schedule.ranks)]


def _run(
    schedule: CollectiveSchedule,
    buffers: list[np.ndarray],
    reduce: Callable[[np.ndarray, np.ndarray], np.ndarray],
    capacity: int,
    turn: Turn,
) -> None:
    lines: dict[tuple[int, int, int], deque[np.ndarray]] = {}
    done: set[int] = set()
    programs = _programs(schedule)
    while programs:
        first = turn(len(programs))
        rotated = (programs[(first + k) % len(programs)] for k in range(len(programs)))
        program = next((p for p in rotated if _can(p[0][1], lines, done, capacity)), None)
        if program is None:
            waiting = "; ".join(f"rank {p[0][1].rank}: {p[0][1]}" for p in programs[:4])
            raise ScheduleError(f"{schedule.name} hangs: {waiting}")
        index, op = program.popleft()
        _do(op, buffers[op.rank], lines, reduce)
        done.add(index)
        if not program:
            programs = [p for p in programs if p]


def _programs(schedule: CollectiveSchedule) -> list[deque[tuple[int, Op]]]:
    threads: dict[tuple[int, int], deque[tuple[int, Op]]] = {}
    for index in range(schedule.operations):
        op = schedule.op(index)
        threads.setdefault((op.rank, op.channel), deque()).append((index, op))
    return list(threads.values())


def _can(
    op: Op, lines: dict[tuple[int, int, int], deque[np.ndarray]], done: set[int], capacity: int
) -> bool:
    if op.after >= 0 and op.after not in done:
        return False
    if op.kind == OpKind.SEND:
        return len(lines.get((op.rank, op.peer, op.channel), ())) < capacity
    if op.kind in (OpKind.RECV, OpKind.RECV_REDUCE):
        return bool(lines.get((op.peer, op.rank, op.channel)))
    return True


def _do(
    op: Op,
    buffer: np.ndarray,
    lines: dict[tuple[int, int, int], deque[np.ndarray]],
    reduce: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> None:
    match op.kind:
        case OpKind.SEND:
            lines.setdefault((op.rank, op.peer, op.channel), deque()).append(buffer[op.slot].copy())
        case OpKind.RECV:
            buffer[op.slot] = lines[op.peer, op.rank, op.channel].popleft()
        case OpKind.RECV_REDUCE:
            arrived = lines[op.peer, op.rank, op.channel].popleft()
            buffer[op.slot] = reduce(buffer[op.slot], arrived)
        case OpKind.COPY:
            buffer[op.slot] = buffer[op.source]
        case OpKind.REDUCE:
            buffer[op.slot] = reduce(buffer[op.slot], buffer[op.source])


def _common_size(schedule: CollectiveSchedule, inputs: Sequence[np.ndarray]) -> int:
    """Elements of the whole vector; ranks that disagree are refused before anything runs."""
    if len(inputs) != schedule.ranks:
        raise ScheduleError(
            f"{schedule.name} is for {schedule.ranks} ranks, got {len(inputs)} arrays"
        )
    for rank, vector in enumerate(inputs):
        if vector.shape != inputs[0].shape or vector.dtype != inputs[0].dtype or vector.ndim != 1:
            raise ScheduleError(
                f"{schedule.collective}: rank {rank} brings {vector.dtype}{list(vector.shape)}, "
                f"rank 0 {inputs[0].dtype}{list(inputs[0].shape)}",
                hint="all ranks bring vectors of one length and type",
            )
    size = len(inputs[0]) * (schedule.ranks if schedule.collective == "all_gather" else 1)
    shared = schedule.collective in ("all_gather", "reduce_scatter", "all_to_all")
    if shared and size % schedule.chunks:
        raise ScheduleError(
            f"{schedule.collective}: {size} elements do not divide into {schedule.chunks} chunks"
        )
    return size


def _buffer(schedule: CollectiveSchedule, vector: np.ndarray, chunk: int, rank: int) -> np.ndarray:
    buffer = np.zeros((schedule.slots, chunk), vector.dtype)
    flat = buffer.reshape(-1)
    first = rank * len(vector) if schedule.collective == "all_gather" else 0
    flat[first : first + len(vector)] = vector
    return buffer


def _output(schedule: CollectiveSchedule, buffer: np.ndarray, rank: int, size: int) -> np.ndarray:
    flat = buffer.reshape(-1)
    if schedule.collective == "all_to_all":
        return flat[size : 2 * size].copy()
    if schedule.collective == "reduce_scatter":
        share = size // schedule.ranks
        return flat[rank * share : (rank + 1) * share].copy()
    return flat[:size].copy()
