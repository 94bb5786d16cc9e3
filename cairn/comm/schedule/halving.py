"""Recursive halving and doubling: pair up, exchange half, pair up further away, exchange a quarter.

    step 0   0<->1  2<->3  4<->5  6<->7        the doubling half: blocks of 1, 2, 4 chunks
    step 1   0<->2  1<->3  4<->6  5<->7        run backwards it is the halving half
    step 2   0<->4  1<->5  2<->6  3<->7

The bytes of a ring in log2(n) waits, for a power of two. For any other n the surplus ranks first
fold into a neighbour and are told the result at the end, as in Rabenseifner's algorithm (2004).
"""

import numpy as np

from cairn.comm.schedule.plan import Plan


def doubling_gather(members: np.ndarray, ranks: int) -> Plan:
    """Member i holds chunk i; their number must be a power of two."""
    plan = Plan(ranks)
    place = np.arange(len(members))
    distance = 1
    while distance < len(members):
        block = place // distance * distance  # where the block that a member has begins
        chunk = block[:, None] + np.arange(distance)
        plan.send(members[place][:, None], members[place ^ distance][:, None], chunk)
        distance *= 2
    return plan


def halving_doubling(ranks: int) -> tuple[Plan, int]:
    """All-reduce, and how many chunks it cuts the vector into: the greatest power of two below."""
    chunks = 1 << (ranks.bit_length() - 1)
    surplus = ranks - chunks
    folded = 2 * np.arange(surplus)  # even ranks of the first pairs lend theirs to the odd ones
    members = np.concatenate([folded + 1, np.arange(2 * surplus, ranks)])
    every = np.arange(chunks)
    fold = Plan(ranks)
    fold.send(folded[:, None], folded[:, None] + 1, every, reduce=True)
    tell = Plan(ranks)
    tell.send(folded[:, None] + 1, folded[:, None], every)
    gather = doubling_gather(members, ranks)
    return fold.then(gather.reversed()).then(gather).then(tell), chunks
