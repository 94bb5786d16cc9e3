"""Index of the GPUs that running elastic jobs could release or take, maintained incrementally.

    a gang of 4 nodes, halved      leaves 2 nodes whole: they are free for another gang
    a job of 8 GPUs on one node    gives 4, and keeps the node: no gang gains by it

`emptied` counts the nodes that would be idle if every job halved that can. Knows no time and no queue.
"""

from cairn.cluster.simulate.free_gpus import Free, lowest_bits
from cairn.cluster.simulate.jobs import Pieces, Running, SimulatedJob


class Offers:
    def __init__(self) -> None:
        self.halvable: dict[int, Running] = {}  # by job: who may go on with half its GPUs
        self.doublable: dict[int, Running] = {}
        self._left_whole = 0  # nodes whose GPUs are all of one job, which would leave
        self._left_part: dict[int, int] = {}  # node -> GPUs of jobs that would leave it

    def add(self, run: Running, gpus_of_node: int) -> None:
        job, identity = run.job, run.job.id
        if can_double(job, run.gpus):
            self.doublable[identity] = run
        if can_halve(job, run.gpus):
            self.halvable[identity] = run
            self._count(run, gpus_of_node, +1)

    def drop(self, run: Running, gpus_of_node: int) -> None:
        self.doublable.pop(run.job.id, None)
        if self.halvable.pop(run.job.id, None) is not None:
            self._count(run, gpus_of_node, -1)

    def _count(self, run: Running, gpus_of_node: int, sign: int) -> None:
        if len(run.pieces) == 1:
            return
        own = {node: mask for node, mask, _ in run.pieces}
        for node, mask, _ in upper_half(run):
            if mask.bit_count() == gpus_of_node:
                self._left_whole += sign
            elif mask == own[node]:
                self._left_part[node] = self._left_part.get(node, 0) ^ mask

    def emptied(self, free: Free) -> int:
        """Nodes in use that would be idle if all of `halvable` halved."""
        if not self._left_part:
            return self._left_whole
        all_idle, masks = (1 << free.gpus) - 1, free.masks
        parts = sum(
            mask and masks[node] | mask == all_idle for node, mask in self._left_part.items()
        )
        return self._left_whole + parts


def can_halve(job: SimulatedJob, gpus: int) -> bool:
    return job.elastic and gpus % 2 == 0 and gpus // 2 >= job.least


def can_double(job: SimulatedJob, gpus: int) -> bool:
    return job.elastic and gpus * 2 <= job.gpus


def upper_half(run: Running) -> Pieces:
    """The pieces that a job gives back when it halves: its last nodes, or the higher GPUs of its only one."""
    if run.half is None:
        run.half = _upper_half(run)
    return run.half


def _upper_half(run: Running) -> Pieces:
    needed = run.gpus // 2
    back = []
    for node, mask, milli in reversed(run.pieces):
        if needed == 0:
            break
        count = mask.bit_count()
        freed = mask if count <= needed else mask ^ lowest_bits(mask, count - needed)
        needed -= min(count, needed)
        back.append((node, freed, milli))
    return tuple(back)
