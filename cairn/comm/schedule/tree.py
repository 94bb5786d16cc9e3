"""Up a tree to its root, and down again: a logarithmic number of waits for the wire.

    0---------------8            A binary tree uses half of each link: a leaf only sends up, an inner
            ______/ \\______      rank sends twice down. So two trees are laid over the ranks, each
           4               12    carries half of the chunks, and no rank is inner in both
          / \\             /     (Sanders, Speck, Träff, 2009). The second is the mirror image where
        2     6         10       the number of ranks is even, and shifted by one rank where it is odd.
       / \\   / \\       /  \\
      1   3 5   7     9   11     Inner ranks are even, leaves odd, so mirror and shift exchange them.

Reducing up and spreading down run on channels of their own: chunks follow each other without a gap.
`binomial_broadcast` is the plain tree for one small chunk: in step k every rank that has it tells
the one 2^k further.
"""

import numpy as np

from cairn.comm.schedule.plan import SchedulePlan

TOP = -1  # the parent of a root


def tree_parents(ranks: int) -> np.ndarray:
    """Parent of each rank in the tree above: the lowest set bit says how high a rank stands."""
    rank = np.arange(ranks)
    low = rank & -rank
    parent = (rank ^ low) | (low << 1)
    parent = np.where(parent >= ranks, rank ^ low, parent)  # beyond the end: the one below it
    parent[:1] = TOP
    return parent


def double_tree_parents(ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Both trees."""
    first, rank = tree_parents(ranks), np.arange(ranks)
    if ranks % 2:
        shifted = first[(rank - 1) % ranks]
        return first, np.where(shifted == TOP, TOP, (shifted + 1) % ranks)
    shifted = first[ranks - 1 - rank]
    return first, np.where(shifted == TOP, TOP, ranks - 1 - shifted)


def depths(parents: np.ndarray) -> np.ndarray:
    """Number of edges from each rank to the root."""
    above, depth = parents.copy(), np.zeros(len(parents), dtype=np.int64)
    while (above != TOP).any():
        depth += above != TOP
        above = np.where(above == TOP, TOP, parents[above])
    return depth


def double_tree_all_reduce(ranks: int, chunks: int) -> SchedulePlan:
    """Even chunks over the first tree, odd ones over the second."""
    plan = SchedulePlan(ranks)
    for which, parents in enumerate(double_tree_parents(ranks)):
        child, chunk, level, depth = _edges(parents, range(which, chunks, 2))
        parent = parents[child]
        up = chunk * 4 * depth + depth - level
        down = (chunk + 1) * 4 * depth + level
        plan.send(child, parent, chunk, reduce=True, channel=2 * which, step=up)
        plan.send(parent, child, chunk, channel=2 * which + 1, step=down)
    return plan


def double_tree_broadcast(ranks: int, chunks: int, root: int = 0) -> SchedulePlan:
    """Down both trees over the other ranks; the root feeds the top of each."""
    plan = SchedulePlan(ranks)
    if ranks == 1:
        return plan
    others = (root + 1 + np.arange(ranks - 1)) % ranks
    for which, parents in enumerate(double_tree_parents(ranks - 1)):
        child, chunk, level, depth = _edges(parents, range(which, chunks, 2))
        mine = np.arange(which, chunks, 2)
        top = others[parents == TOP]
        span = 2 * depth + 2
        plan.send(root, top, mine, channel=which, step=mine * span)
        plan.send(
            others[parents[child]], others[child], chunk, channel=which, step=chunk * span + level
        )
    return plan


def binomial_broadcast(ranks: int, root: int = 0) -> SchedulePlan:
    plan = SchedulePlan(ranks)
    reach = 1
    while reach < ranks:
        told = np.arange(min(reach, ranks - reach))
        plan.send((root + told) % ranks, (root + told + reach) % ranks, chunk=0)
        reach *= 2
    return plan


def _edges(parents: np.ndarray, chunks: range) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Every edge for every chunk: child, chunk, depth of the child; and the greatest depth."""
    level = depths(parents)
    children = np.flatnonzero(parents != TOP)
    child = np.tile(children, len(chunks))
    chunk = np.repeat(np.array(chunks, dtype=np.int64), len(children))
    return child, chunk, level[child], max(int(level.max(initial=0)), 1)
