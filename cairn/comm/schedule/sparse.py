"""Block-sparse all-reduce: blocks that are all zeros are not sent.

The vector is cut into blocks; `present[rank, block]` says who has anything in it. Every block has an
owner, blocks are dealt out in turn. A rank that has something sends it to the owner, which adds it up
and sends the sum to everyone. A block that is zero everywhere costs nothing.

    present      block 0 1 2 3        block 0, owner 0:  1 -> 0,  then 0 -> 1, 2
      rank 0           . x . .        block 1, owner 1:  0 -> 1, 2 -> 1,  then 1 -> 0, 2
      rank 1           x . . .        block 2, owner 2:  nothing
      rank 2           . x . x        block 3, owner 0:  2 -> 0,  then 0 -> 1, 2

OmniReduce (Fei et al., 2021) lets the aggregator ask for the next block while it works; here the
bitmaps are exchanged first, n bits for each block, and the schedule is made from them.
"""

import numpy as np

from cairn.comm.schedule.ops import ScheduleError
from cairn.comm.schedule.plan import SchedulePlan


def sparse_all_reduce(present: np.ndarray) -> SchedulePlan:
    """`present` is [ranks, blocks] of booleans."""
    present = np.asarray(present)
    if present.ndim != 2 or present.dtype != np.bool_:
        raise ScheduleError(
            f"the map of blocks has shape {present.shape} and type {present.dtype}",
            hint="it is [ranks, blocks] of booleans",
        )
    ranks, blocks = present.shape
    plan = SchedulePlan(ranks)
    owner, round_of = np.arange(blocks) % ranks, np.arange(blocks) // ranks
    alive = present.any(axis=0)
    base = 2 * ranks * round_of
    for away in range(1, ranks):
        source = (owner - away) % ranks
        sent_blocks = np.flatnonzero(present[source, np.arange(blocks)])
        plan.send(
            source[sent_blocks],
            owner[sent_blocks],
            sent_blocks,
            reduce=True,
            step=base[sent_blocks] + away,
        )
    for away in range(1, ranks):
        summed_blocks = np.flatnonzero(alive)
        target = (owner + away) % ranks
        plan.send(
            owner[summed_blocks],
            target[summed_blocks],
            summed_blocks,
            step=base[summed_blocks] + ranks + away,
        )
    return plan


def example_blocks(ranks: int, blocks: int, density: float = 0.25) -> np.ndarray:
    """A map that is the same on every machine: a fixed sequence, no random generator."""
    place = np.arange(ranks)[:, None] * 7919 + np.arange(blocks) * 104729
    return (place * 2654435761 % (1 << 32)) < density * (1 << 32)
