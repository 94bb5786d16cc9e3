"""PAT, parallel aggregated trees: Bruck's gather with the far steps first.

The chunk of each rank spreads over a binomial tree of distances, shifted to begin at that rank. Far
distances come first, while there is little to send; near ones last, when there is most: the long
way of a large fabric carries few bytes.

    n = 8:   +4 with 1 chunk,   +2 with 2 chunks,   +1 with 4 chunks

A message carries at most `aggregate` chunks. Once that many are held together, the rest of the tree
is walked depth first, one edge at a time with the whole bundle, so that what waits in between is a
bundle for each level: a logarithmic amount of buffer, whatever the number of ranks.

    aggregate >= n/2    ceil(log2 n) steps, as Bruck
    aggregate = 1       n - 1 steps, as a ring

After Jeaugey, arXiv:2506.20252; NCCL uses it where each node has one GPU.
"""

import numpy as np

from cairn.comm.schedule.ops import ScheduleError
from cairn.comm.schedule.plan import SchedulePlan


def pat_gather(ranks: int, aggregate: int | None = None) -> SchedulePlan:
    """Run backwards it is PAT's reduce-scatter."""
    limit = ranks if aggregate is None else aggregate
    if limit < 1:
        raise ScheduleError(f"PAT cannot aggregate {limit} chunks", hint="use 1 or more")
    plan = SchedulePlan(ranks)
    offsets = np.zeros(1, dtype=np.int64)  # how far behind its rank each held chunk began
    distance = _power_below(ranks)
    while distance >= 1:
        to_send = offsets[offsets + distance < ranks]
        if distance > 1 and len(offsets) + len(to_send) > limit:
            break  # the next bundle would be too large: walk the rest of the tree with this one
        _hop(plan, ranks, to_send, distance)
        offsets = np.concatenate([offsets, to_send + distance])
        distance //= 2
    _walk(plan, ranks, offsets, 0, distance)
    return plan


def _walk(plan: SchedulePlan, ranks: int, bundle: np.ndarray, offset: int, distance: int) -> None:
    """Depth first: the whole bundle one edge down, then what hangs below that edge."""
    while distance >= 1:
        to_send = bundle + offset
        to_send = to_send[to_send + distance < ranks]
        _hop(plan, ranks, to_send, distance)
        _walk(plan, ranks, bundle, offset + distance, distance // 2)
        distance //= 2


def _hop(plan: SchedulePlan, ranks: int, offsets: np.ndarray, distance: int) -> None:
    """Every rank sends the chunks that began `offsets` ranks behind it `distance` ranks further."""
    rank = np.arange(ranks)[:, None]
    plan.send(rank, (rank + distance) % ranks, chunk=(rank - offsets) % ranks)


def _power_below(ranks: int) -> int:
    """The greatest power of two below `ranks`; 0 when there is nowhere to go."""
    return 1 << ((ranks - 1).bit_length() - 1) if ranks > 1 else 0
