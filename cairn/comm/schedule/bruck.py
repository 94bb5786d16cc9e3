"""Bruck's algorithms: ceil(log2 n) waits for any number of ranks.

Gather: every rank has a run of chunks that begins with its own; in step k it gives the first 2^k of
them to the rank 2^k below, whose run becomes twice as long.

    step 0   0 <- 1   1 <- 2   2 <- 3   ...        runs of 1 become runs of 2
    step 1   0 <- 2   1 <- 3   2 <- 4   ...        runs of 2 become runs of 4

All-to-all: what is to go i ranks further travels the distance bit by bit of i. Each chunk is sent
once for each bit that is set, log2(n)/2 times on average: for messages so small that waits matter.
Bruck et al., 1997.
"""

import numpy as np

from cairn.comm.schedule.plan import Plan


def bruck_gather(ranks: int) -> Plan:
    plan = Plan(ranks)
    rank = np.arange(ranks)[:, None]
    have = 1
    while have < ranks:
        run = np.arange(min(have, ranks - have))
        plan.send(rank, (rank - have) % ranks, chunk=(rank + run) % ranks)
        have *= 2
    return plan


def bruck_all_to_all(ranks: int) -> tuple[Plan, int]:
    """The plan and its slots: n to send, n received, n on their way."""
    plan = Plan(ranks)
    rank, ahead = np.arange(ranks)[:, None], np.arange(ranks)
    way = 2 * ranks + ahead  # slot of what goes `ahead` ranks further
    plan.copy(rank, (rank + ahead) % ranks, to=way)
    distance = 1
    while distance < ranks:
        moving = way[(ahead & distance) != 0]
        plan.send(rank, (rank + distance) % ranks, chunk=moving)
        distance *= 2
    plan.copy(rank, way, to=ranks + (rank - ahead) % ranks)
    return plan, 3 * ranks
