"""All-to-all: every rank has another chunk for every rank. Expert parallelism does it twice in each layer.

    slots 0 .. n-1     what to send, by destination
    slots n .. 2n-1    what has come, by origin

Pairwise: in round t rank r sends to r + t and receives from r - t. The fewest bytes there are, n - 1
messages from each rank, no two to one rank in the same round. For small messages see `bruck`, for
two networks of different speed `hierarchical`.
"""

import numpy as np

from cairn.comm.schedule.plan import Plan


def pairwise_all_to_all(ranks: int) -> tuple[Plan, int]:
    """The plan and its slots."""
    plan = Plan(ranks)
    rank = np.arange(ranks)
    plan.copy(rank, rank, to=ranks + rank)
    for away in range(1, ranks):
        peer = (rank + away) % ranks
        plan.send(rank, peer, chunk=peer, to=ranks + rank)
    return plan, 2 * ranks
