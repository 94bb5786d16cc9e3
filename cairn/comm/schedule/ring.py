"""Around a ring: each rank receives from its left and sends to its right.

    0 -> 1 -> 2 -> 3 -> 0        n - 1 steps to gather, and as many to reduce and scatter

Moves the fewest bytes there are, evenly over every link, and waits n - 1 times for the wire: the
choice for large messages and few ranks. `chain` is a ring that is cut, for broadcast: chunk after
chunk, so that n - 2 + chunks steps do it.
Bandwidth optimality: Patarasuk and Yuan, 2009.
"""

import numpy as np

from cairn.comm.schedule.plan import Plan


def ring_gather(ranks: int) -> Plan:
    """At step s every rank hands on the chunk that it got s steps ago."""
    plan = Plan(ranks)
    rank = np.arange(ranks)
    for step in range(ranks - 1):
        plan.send(rank, (rank + 1) % ranks, chunk=(rank - step) % ranks)
    return plan


def chain_broadcast(ranks: int, chunks: int, root: int = 0) -> Plan:
    """root -> root+1 -> ... -> root-1, one chunk behind the other."""
    plan = Plan(ranks)
    hop, chunk = np.divmod(np.arange((ranks - 1) * chunks), max(chunks, 1))
    source = (root + hop) % ranks
    plan.send(source, (source + 1) % ranks, chunk, step=chunk * ranks + hop)
    return plan
