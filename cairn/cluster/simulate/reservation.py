"""When can a job that does not fit now start at the latest, and on which nodes?

Running jobs are given up one by one in the order of their limits, on a sketch of the nodes they touch, until the gang
fits. Nodes that become free late are promised first, so that what is free now stays free for others. The promise holds:
nobody runs beyond its limit, and whoever starts meanwhile ends before or stays off the nodes. Pure.
"""

from collections.abc import Iterable, Mapping

import msgspec

from cairn.cluster.simulate.free import Free, lowest_bits
from cairn.cluster.simulate.jobs import MILLI, Job, Running


class Reservation(msgspec.Struct, frozen=True):
    at: float
    nodes: int  # bits


class _Sketch:
    """The nodes as they will be, only where they differ from now."""

    def __init__(self, free: Free) -> None:
        self._free = free
        self._idle: dict[int, int] = {}
        self._left: dict[tuple[int, int], int] = {}

    def idle(self, node: int) -> int:
        return self._idle.get(node, self._free.state[node][0])

    def give(self, node: int, mask: int, milli: int) -> int:
        """Most that one GPU of this node has left now, in thousandths."""
        freed = mask.bit_count()
        most = MILLI
        if milli < MILLI:
            gpu = mask.bit_length() - 1
            left = self._left.get((node, gpu), self._free.shared[node].get(gpu, 0)) + milli
            self._left[node, gpu] = most = left
            freed = int(left == MILLI)
        if freed:
            self._idle[node] = self.idle(node) + freed
        return most


def reserve(
    free: Free,
    ends: Iterable[tuple[float, int]],
    running: Mapping[int, Running],
    job: Job,
    now: float,
) -> Reservation:
    """The earliest time that is certain. `ends` are (limit, id) in order; the job fits an empty cluster."""
    whole, rest = divmod(job.gpus, free.gpus)
    if not (job.milli == MILLI and whole and (whole > 1 or rest)):
        return _one_node(free, ends, running, job, now)
    sketch = _Sketch(free)
    first = free.groups.get((free.gpus,), 0)  # idle already
    later: list[int] = []  # nodes that become idle, in order
    parts = (
        {node for node, state in enumerate(free.state) if rest <= state[0] < free.gpus}
        if rest
        else set()
    )
    for end, identity in ends:
        for node, mask, milli in running[identity].pieces:
            sketch.give(node, mask, milli)
            if sketch.idle(node) == free.gpus:
                later.append(node)
                parts.discard(node)
            elif rest and sketch.idle(node) >= rest:
                parts.add(node)
        together = first.bit_count() + len(later)
        if together >= whole + bool(rest) or (together == whole and parts):
            return Reservation(max(end, now), _promise(first, later, whole, bool(rest), parts))
    raise RuntimeError(f"job {job.id} does not fit an empty cluster")


def _promise(first: int, later: list[int], whole: int, rest: bool, parts: set[int]) -> int:
    nodes = 0
    for node in reversed(later[-whole:]):
        nodes |= 1 << node
    missing = whole - nodes.bit_count()
    # A placement takes the lowest node; a promise therefore the highest, to stay out of its way.
    nodes |= _highest_bits(first, missing)
    if rest:
        unused = [node for node in later if not nodes >> node & 1]
        spare = first & ~nodes
        nodes |= 1 << (max(parts) if parts else unused[-1] if unused else spare.bit_length() - 1)
    return nodes


def _highest_bits(bits: int, count: int) -> int:
    return bits & ~lowest_bits(bits, bits.bit_count() - count) if count else 0


def _one_node(
    free: Free,
    ends: Iterable[tuple[float, int]],
    running: Mapping[int, Running],
    job: Job,
    now: float,
) -> Reservation:
    if job.milli == MILLI:
        found = _one_node_whole(free, ends, running, job.gpus, now)
        if found is not None:
            return found
    sketch = _Sketch(free)
    for end, identity in ends:
        for node, mask, milli in running[identity].pieces:
            left = sketch.give(node, mask, milli)
            if sketch.idle(node) >= job.gpus or (job.milli < MILLI and left >= job.milli):
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
