"""Direct exchange: every rank sends straight to all others, in one step (one-shot) or in two (two-shot).

    one-shot   everyone sends all of its vector to everyone, and adds up what arrives:
               (n-1) vectors on the wire, one wait. For a few KiB between GPUs that see each other.
    two-shot   everyone sends chunk r to rank r, which adds it up (reduce-scatter), and sends the sum
               to everyone (gather): the bytes of a ring, two waits.

Lane t of a step goes from rank r to r + t, so that not all send to one rank at once.
"""

import numpy as np

from cairn.comm.schedule.plan import Plan


def direct_gather(ranks: int) -> Plan:
    """Everyone sends its chunk to everyone."""
    plan = Plan(ranks)
    rank = np.arange(ranks)[:, None]
    plan.send(rank, (rank + np.arange(1, ranks)) % ranks, chunk=rank)
    return plan


def one_shot_all_reduce(ranks: int) -> tuple[Plan, int]:
    """The plan and its slots: the vector, and one place for the vector of each rank.

    Everyone adds in the order of the ranks, its own at its place, so that all have the same bits:
    a floating-point sum in another order would differ from rank to rank. Two need no places:
    a + b is b + a.
    """
    plan = Plan(ranks)
    rank = np.arange(ranks)
    if ranks == 2:
        plan.send(rank, 1 - rank, chunk=0, reduce=True)
        return plan, 1
    later = rank[1:]  # rank 0 begins with its own, where it already is
    plan.copy(later, 0, to=1 + later)
    here = rank[:, None]
    plan.send(here, (here + np.arange(1, ranks)) % ranks, chunk=0, to=1 + here)
    plan.copy(later, 1, to=0)
    for other in range(1, ranks):
        plan.send(rank, -1, 1 + other, to=0, reduce=True)
    return plan, 1 + ranks
