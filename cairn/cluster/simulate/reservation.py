"""When can a job that does not fit now start at the latest, and on which nodes?

Running jobs are given up one by one in the order of their limits, on a sketch of the nodes they touch, until the gang
fits. Nodes that become free late are promised first, so that what is free now stays free for others. The promise holds:
no job runs beyond its limit, and one that starts meanwhile ends before or stays off the nodes. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from cairn.cluster.simulate.free_gpus import Free
from cairn.cluster.simulate.jobs import MILLI, Running, SimulatedJob


class Reservation(msgspec.Struct, frozen=True):
    at: float
    nodes: int  # bits


class _Shared:
    """Future free shares of GPUs, where they differ from now."""

    def __init__(self, free: Free) -> None:
        self._free = free
        self._left: dict[tuple[int, int], int] = {}

    def give(self, node: int, mask: int, milli: int) -> int:
        """Free share of a GPU after `milli` thousandths are released."""
        left = self._left.get((node, mask))
        if left is None:
            left = self._free.shared[node].get(mask.bit_length() - 1, 0)
        self._left[node, mask] = left = left + milli
        return left


def reserve(
    free: Free,
    ends: Iterable[tuple[float, int]],
    running: Mapping[int, Running],
    job: SimulatedJob,
    now: float,
) -> Reservation:
    """The earliest time that is certain. `ends` are (limit, id) in order; the job fits an empty cluster."""
    whole, rest = divmod(job.gpus, free.gpus)
    if not (job.milli == MILLI and whole and (whole > 1 or rest)):
        return _one_node(free, ends, running, job, now)
    first = free.groups.get((free.gpus,), 0)  # idle already
    missing = whole - first.bit_count()
    all_idle = (1 << free.gpus) - 1
    coming, shared = list(free.masks), _Shared(free)  # GPUs of each node that are idle by then
    later: list[int] = []  # nodes that become idle, in order
    for end, identity in ends:
        for node, mask, milli in running[identity].pieces:
            if milli < MILLI and shared.give(node, mask, milli) < MILLI:
                continue
            coming[node] = mask = mask | coming[node]
            if mask == all_idle:
                later.append(node)
        if len(later) < missing:
            continue
        parts = _parts(coming, rest, free.gpus) if rest and len(later) == missing else set()
        if not rest or parts or len(later) > missing:
            return Reservation(max(end, now), _promise(first, later, whole, bool(rest), parts))
    raise RuntimeError(f"job {job.id} does not fit an empty cluster")


def _parts(idle: Sequence[int], rest: int, gpus: int) -> set[int]:
    """Nodes that are not idle, and have as many idle GPUs as the rest of a gang needs."""
    return {node for node, mask in enumerate(idle) if rest <= mask.bit_count() < gpus}


def _promise(first: int, later: list[int], whole: int, rest: bool, parts: set[int]) -> int:
    nodes = 0
    for node in later[-whole:]:
        nodes |= 1 << node
    missing = max(0, whole - len(later))
    # A placement takes the lowest node; a promise therefore the highest, to stay out of its way.
    nodes |= _highest_bits(first, missing)
    if rest:
        unused = [node for node in later if not nodes >> node & 1]
        spare = first & ~nodes
        nodes |= 1 << (max(parts) if parts else unused[-1] if unused else spare.bit_length() - 1)
    return nodes


def _highest_bits(bits: int, count: int) -> int:
    chosen = 0
    for _ in range(count):
        top = 1 << (bits.bit_length() - 1)
        chosen |= top
        bits ^= top
    return chosen


def _one_node(
    free: Free,
    ends: Iterable[tuple[float, int]],
    running: Mapping[int, Running],
    job: SimulatedJob,
    now: float,
) -> Reservation:
    if job.milli == MILLI:
        reservation = _one_node_whole(free, ends, running, job.gpus, now)
        if reservation is not None:
            return reservation
    masks, coming, shared = free.masks, {}, _Shared(free)
    for end, identity in ends:
        for node, mask, milli in running[identity].pieces:
            left = shared.give(node, mask, milli) if milli < MILLI else MILLI
            if job.milli < MILLI and left >= job.milli:
                return Reservation(max(end, now), 1 << node)
            if left == MILLI:
                coming[node] = mask | (coming[node] if node in coming else masks[node])
                if coming[node].bit_count() >= job.gpus:
                    return Reservation(max(end, now), 1 << node)
    raise RuntimeError(f"job {job.id} does not fit an empty cluster")


def _one_node_whole(
    free: Free,
    ends: Iterable[tuple[float, int]],
    running: Mapping[int, Running],
    gpus: int,
    now: float,
) -> Reservation | None:
    """The same by whole GPUs alone, which is most of a replay's time; None where shared ones would be needed too."""
    masks, freed = free.masks, {}
    for end, identity in ends:
        for node, mask, milli in running[identity].pieces:
            if milli < MILLI:
                continue
            mask |= freed.get(node, 0)
            if (mask | masks[node]).bit_count() >= gpus:
                return Reservation(max(end, now), 1 << node)
            freed[node] = mask
    return None
