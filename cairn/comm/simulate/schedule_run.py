"""A proved schedule on a link graph: the very operations that `verify` proves and a backend executes.

Every send takes the links of its path, one chunk at a time and in the order in which chunks ask for
them; a receive is done when the last byte has come. Threads, waits between channels and full
connections hold operations back as they do in an executor.

    ready -> every link of the path free -> bytes / slowest link -> + delay -> the receiver has it

One operation after another in Python: for tens of thousands of operations, so for some dozen ranks.
`collective` does a hundred thousand GPUs, for the schedules that it knows.
"""

import heapq
from typing import NamedTuple

import numpy as np

from cairn.comm.schedule.ops import CollectiveSchedule, OpKind, ScheduleError
from cairn.comm.schedule.waits import NONE, join, pair, room
from cairn.comm.simulate.topology import NO_LINK, FabricTopology, delay_us, links, route
from cairn.core.errors import ConfigError

MOST_OPERATIONS = 400_000


class ScheduleRun(NamedTuple):
    us: float
    done: np.ndarray  # of each operation
    busiest: float  # share of the time that the busiest link was in use


class _Wires(NamedTuple):
    """Paths of all sends over one numbering of links: NVLink ports first, then rail after rail."""

    path: list[tuple[int, ...]]
    us_per_byte: list[float]  # of each link
    delay: list[float]


def run_schedule(
    schedule: CollectiveSchedule, top: FabricTopology, size: int, capacity: int = 8
) -> ScheduleRun:
    """`size` bytes of the whole vector; a connection holds `capacity` chunks."""
    if schedule.nodes != top.gpus:
        raise ConfigError(
            f"{schedule.name} is for {schedule.nodes} ranks, the cluster has {top.gpus} GPUs"
        )
    if schedule.operations > MOST_OPERATIONS:
        raise ConfigError(
            f"{schedule.operations:,} operations are too many to run one by one",
            hint=f"up to {MOST_OPERATIONS:,}; `cairn comm simulate` does large clusters",
        )
    if not schedule.operations:
        return ScheduleRun(0.0, np.zeros(0), 0.0)
    chunk = size / schedule.chunks
    ops = join([schedule])
    partner, place = pair(ops)
    waits = np.stack(
        [
            np.where(ops.kind == int(OpKind.SEND), NONE, partner),
            room(ops, partner, place, capacity),
            ops.after,
        ]
    )
    wires = _wires(schedule, top)
    done, busy = _events(ops.thread_begin, ops.thread_end, ops.kind, waits, wires, chunk)
    if (done < 0).any():
        stuck = int(np.flatnonzero(done < 0)[0])
        raise ScheduleError(f"{schedule.name} hangs at {schedule.op(stuck)}")
    total = float(done.max())
    return ScheduleRun(total, done, max(busy, default=0.0) / total if total else 0.0)


def _events(
    begin: np.ndarray,
    end: np.ndarray,
    kind: np.ndarray,
    waits: np.ndarray,
    wires: _Wires,
    chunk: float,
) -> tuple[np.ndarray, list[float]]:
    """Threads go on in the order of their times; one that waits is woken by what it waits for."""
    done = np.full(len(kind), -1.0)
    arrived = np.full(len(kind), -1.0)  # of a send: when the receiver has it
    free, busy = [0.0] * len(wires.us_per_byte), [0.0] * len(wires.us_per_byte)
    place = begin.tolist()
    sleeping: dict[int, list[tuple[float, int]]] = {}
    line = [(0.0, thread) for thread in range(len(place))]
    heapq.heapify(line)
    while line:
        now, thread = heapq.heappop(line)
        op = place[thread]
        if op == end[thread]:
            continue
        needs = [int(index) for index in waits[:, op] if index != NONE]
        missing = next((index for index in needs if done[index] < 0), None)
        if missing is not None:
            sleeping.setdefault(missing, []).append((now, thread))
            continue
        is_send = kind[op] == int(OpKind.SEND)
        partner = -1 if is_send else int(waits[0, op])
        ready = max([now, *(float(done[index]) for index in needs if index != partner)])
        if partner >= 0:
            ready = max(ready, float(arrived[partner]))
        if is_send and ready > now:
            heapq.heappush(line, (ready, thread))  # others may take the links before
            waits[:, op] = NONE  # all of them are done by then
            continue
        if is_send:
            path = wires.path[op]
            start = max([ready, *(free[link] for link in path)])
            slowest = max(wires.us_per_byte[link] for link in path) * chunk
            for link in path:
                free[link] = start + wires.us_per_byte[link] * chunk
                busy[link] += wires.us_per_byte[link] * chunk
            done[op], arrived[op] = start + slowest, start + slowest + wires.delay[op]
        else:
            done[op] = ready
        place[thread] += 1
        heapq.heappush(line, (float(done[op]), thread))
        for when, waiting in sleeping.pop(op, []):
            heapq.heappush(line, (when, waiting))
    return done, busy


def _wires(schedule: CollectiveSchedule, top: FabricTopology) -> _Wires:
    ops, at = schedule.ops, links(top) if top.tiers else None
    per_plane = len(at.gb_per_s) if at is not None else 0
    rates = np.concatenate(
        [
            np.full(2 * top.gpus, top.nvlink_gb_per_s),
            *([at.gb_per_s] * top.planes if at is not None else []),
        ]
    )
    sends = np.flatnonzero(ops.kind == int(OpKind.SEND))
    source, target = ops.rank[sends], ops.peer[sends]
    paths: list[tuple[int, ...]] = [()] * schedule.operations
    delays = [0.0] * schedule.operations
    near = source // top.domain == target // top.domain
    for op, one, other in zip(sends[near], source[near], target[near], strict=True):
        paths[op], delays[op] = (int(one), top.gpus + int(other)), top.nvlink_us
    if not near.all():
        _far_wires(top, sends[~near], source[~near], target[~near], per_plane, paths, delays)
    return _Wires(paths, (1 / (1e3 * rates)).tolist(), delays)


def _far_wires(
    top: FabricTopology,
    ops: np.ndarray,
    source: np.ndarray,
    target: np.ndarray,
    per_plane: int,
    paths: list[tuple[int, ...]],
    delays: list[float],
) -> None:
    """Over the rail of the receiver; a sender on another rail goes to its neighbour by NVLink first."""
    rail = target % top.domain
    near_port = (source % top.domain != rail) & (top.planes > 1)
    step = (lambda gpu: gpu) if top.planes == 1 else (lambda gpu: gpu // top.domain)
    begin, end = step(source), step(target)
    routes = route(top, begin, end, 0)
    wait = delay_us(top, begin, end) + np.where(near_port, top.nvlink_us, 0.0)
    for row, op in enumerate(ops):
        first = 2 * top.gpus + (0 if top.planes == 1 else int(rail[row]) * per_plane)
        path = tuple(first + int(link) for link in routes[row] if link != NO_LINK)
        port = (int(source[row]),) if near_port[row] else ()
        paths[op], delays[op] = port + path, float(wait[row])
