"""Contract of each collective: the initial and final contents of every rank, and the minimum number of bytes.

A chunk is written as the set of ranks whose numbers are summed in it, and which chunk it is:

    all_reduce, n = 3      start: rank r, slot c:  chunk c of {r}        end: chunk c of {0, 1, 2}

`which` is -1 where a slot holds nothing, or where anything may stand at the end. The sets are bits
in words of 64. Slots: an all-to-all sends from the first `chunks` slots and receives into the next
`chunks`; every other collective works in place. Knows no schedule's operations.
"""

from typing import NamedTuple

import numpy as np

from cairn.comm.schedule.ops import CollectiveSchedule

NOTHING = -1
BITS = 64


class SlotContents(NamedTuple):
    which: np.ndarray  # [nodes, slots] which chunk it is
    who: np.ndarray  # [nodes, slots, words] whose contributions it has


def shape_problem(schedule: CollectiveSchedule) -> str | None:
    """Why these numbers cannot be a collective at all; None when they can."""
    n, chunks = schedule.ranks, schedule.chunks
    needed = chunks * (2 if schedule.collective == "all_to_all" else 1)
    if n < 1 or chunks < 1 or schedule.nodes < n:
        return f"{n} ranks on {schedule.nodes} nodes with {chunks} chunks"
    if schedule.slots < needed:
        return f"{schedule.slots} slots, where {schedule.collective} needs {needed}"
    if schedule.collective in ("all_gather", "reduce_scatter", "all_to_all") and chunks % n:
        return f"{chunks} chunks cannot be shared evenly by {n} ranks"
    if not 0 <= schedule.root < n:
        return f"rank {schedule.root} of {n} cannot be the root"
    if schedule.present is not None and schedule.present.shape != (n, chunks):
        return f"a map of blocks of shape {schedule.present.shape}, not {(n, chunks)}"
    return None


def words(ranks: int) -> int:
    return -(-ranks // BITS)


def start(schedule: CollectiveSchedule, width: int) -> SlotContents:
    """Initial contents of the ranks; sets are `width` words wide."""
    contents = _empty(schedule, width)
    n, chunks, k = schedule.ranks, schedule.chunks, schedule.chunks // schedule.ranks
    rank = np.arange(n)
    match schedule.collective:
        case "all_reduce" | "reduce_scatter" | "reduce":
            contents.which[:n, :chunks] = np.arange(chunks)
            present = schedule.present
            mine = np.ones((n, chunks), dtype=bool) if present is None else present
            rows, columns = np.nonzero(mine)
            contents.who[rows, columns, rows // BITS] = _bit(rows)
        case "all_gather":
            for r in range(n):
                _fill(contents, r, slice(r * k, (r + 1) * k), np.arange(r * k, (r + 1) * k), r)
        case "broadcast":
            _fill(contents, schedule.root, slice(0, chunks), np.arange(chunks), schedule.root)
        case "all_to_all":
            contents.which[:n, :chunks] = rank[:, None] * chunks + np.arange(chunks)
            contents.who[rank, :chunks, rank // BITS] = _bit(rank)[:, None]
    return contents


def end(schedule: CollectiveSchedule, width: int) -> SlotContents:
    """Required final contents; slots with NOTHING may hold anything."""
    contents = _empty(schedule, width)
    n, chunks, k = schedule.ranks, schedule.chunks, schedule.chunks // schedule.ranks
    chunk = np.arange(chunks)
    summed = start(schedule, width).who[:n, :chunks]
    match schedule.collective:
        case "all_reduce":
            contents.which[:n, :chunks] = chunk
            contents.who[:n, :chunks] = np.bitwise_or.reduce(summed, axis=0)
        case "reduce":
            contents.which[schedule.root, :chunks] = chunk
            contents.who[schedule.root, :chunks] = np.bitwise_or.reduce(summed, axis=0)
        case "reduce_scatter":
            owner = chunk // k
            contents.which[owner, chunk] = chunk
            contents.who[owner, chunk] = np.bitwise_or.reduce(summed, axis=0)
        case "all_gather" | "broadcast":
            owner = chunk // k if schedule.collective == "all_gather" else schedule.root + 0 * chunk
            contents.which[:n, :chunks] = chunk
            contents.who[:n, chunk, owner // BITS] = _bit(owner)
        case "all_to_all":
            origin, part = np.divmod(chunk, k)
            slot = chunks + chunk
            for r in range(n):
                contents.which[r, slot] = origin * chunks + r * k + part
                contents.who[r, slot, origin // BITS] = _bit(origin)
    return contents


def fewest_chunks(schedule: CollectiveSchedule) -> float:
    """No schedule lets the busiest rank move fewer chunks, in the direction it moves more.

    All-reduce: for each chunk that u ranks bring, u - 1 transfers must happen before any rank has
    the sum, and the n - 1 others each need one more after that: u + n - 2 in all, shared by n ranks.
    With an aggregator outside, each worker sends what it brings and receives the sum.
    """
    n, chunks = schedule.ranks, schedule.chunks
    if n == 1:
        return 0.0
    match schedule.collective:
        case "all_reduce" if schedule.nodes > n:
            return float(chunks)
        case "all_reduce" if schedule.present is not None:
            bringing = schedule.present.sum(axis=0)
            return float((bringing[bringing > 0] + n - 2).sum() / n)
        case "all_reduce":
            return 2 * (n - 1) / n * chunks
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return (n - 1) / n * chunks
    return float(chunks)  # broadcast: a rank receives it all; reduce: a rank sends it all


def _empty(schedule: CollectiveSchedule, width: int) -> SlotContents:
    shape = (schedule.nodes, schedule.slots)
    return SlotContents(np.full(shape, NOTHING), np.zeros((*shape, width), dtype=np.uint64))


def _bit(rank: np.ndarray) -> np.ndarray:
    return np.uint64(1) << (rank % BITS).astype(np.uint64)


def _fill(contents: SlotContents, rank: int, slots: slice, which: np.ndarray, owner: int) -> None:
    contents.which[rank, slots] = which
    contents.who[rank, slots, owner // BITS] = _bit(np.array(owner))
