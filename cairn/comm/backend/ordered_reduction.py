"""Sums in the order of the ranks, whatever the size: the same bits for every bucket and schedule.

    owner of chunk c: rank c        1  each rank sends chunk c to its owner, into a place of its own
    places: one for each rank       2  the owner adds them up: ((0 + 1) + 2) + ...
                                    3  and sends the sum to all (not in a reduce-scatter)

Every schedule gives the same bits in every run; but which order it adds in depends on the chunk, and
so on the size of the vector. Here an element's sum is the same wherever it lies, and the same as in
`one_shot`, which adds in that order too. Costs n - 1 chunks of staging, and the bytes of a ring.
"""

import numpy as np

from cairn.comm.schedule.direct import direct_gather
from cairn.comm.schedule.ops import Schedule
from cairn.comm.schedule.plan import Plan


def ordered_all_reduce(ranks: int) -> Schedule:
    plan = _sums(ranks).then(direct_gather(ranks))
    return plan.lower("ordered", "all_reduce", chunks=ranks, slots=2 * ranks)


def ordered_reduce_scatter(ranks: int) -> Schedule:
    return _sums(ranks).lower("ordered", "reduce_scatter", chunks=ranks, slots=2 * ranks)


def _sums(ranks: int) -> Plan:
    """Chunk r of all ranks added up at rank r; slot n + k holds what came from rank k."""
    plan = Plan(ranks)
    rank = np.arange(ranks)
    later = rank[1:]  # rank 0 begins with its own, where it already is
    plan.copy(later, later, to=ranks + later)
    here = rank[:, None]
    owner = (here + np.arange(1, ranks)) % ranks
    plan.send(here, owner, chunk=owner, to=ranks + here)
    plan.copy(later, ranks, to=later)
    for other in range(1, ranks):
        plan.send(rank, -1, ranks + other, to=rank, reduce=True)
    return plan
