"""Placement of in-memory copies on nodes, and the newest step that can be recovered after losses.

    4 nodes, 2 copies       0 <-> 1    2 <-> 3         groups: lost only if a whole group is
    5 nodes                 0 <-> 1    2 -> 3 -> 4 -> 2  the last group takes what is left over

Pure: no sockets, no clock. Groups rather than a ring because two nodes that fail together are rarely one group
(Gemini, SOSP 2023): `survives` is that chance.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from cairn.train.checkpoint.peer_messages import HeldCopy
from cairn.train.checkpoint.peer_restore import Recall, Where


def node_of(rank: int, world: int, nodes: Sequence[int]) -> int:
    """Ranks stand side by side on the nodes, as evenly as it goes."""
    return nodes[rank * len(nodes) // world]


def keepers(domains: Sequence[int]) -> list[int | None]:
    """The node that keeps the copies of each node's ranks. `domains[n]` is the failure domain of node n.

    A node's keeper stands in another domain wherever there is one; None only for a node on its own.
    """
    order = _spread(domains)
    keeper_of: list[int | None] = [None] * len(domains)
    for group in _groups(order):
        for place, node in enumerate(group):
            if len(group) > 1:
                keeper_of[node] = group[(place + 1) % len(group)]
    for node, keeper in enumerate(keeper_of):
        if keeper is None or domains[keeper] == domains[node]:
            others = [n for n in order if domains[n] != domains[node]]
            keeper_of[node] = others[node % len(others)] if others else keeper
    return keeper_of


def _spread(domains: Sequence[int]) -> list[int]:
    """Nodes so ordered that neighbours are of different domains, as far as it goes."""
    by_domain: dict[int, list[int]] = {}
    for node, domain in enumerate(domains):
        by_domain.setdefault(domain, []).append(node)
    piles = sorted(by_domain.values(), key=len, reverse=True)
    longest = max(map(len, piles), default=0)
    return [pile[row] for row in range(longest) for pile in piles if row < len(pile)]


def _groups(order: Sequence[int]) -> list[Sequence[int]]:
    """Pairs; the last three stay together when the number is odd."""
    pairs = max(1, len(order) // 2)
    return [order[2 * i : 2 * i + 2 if i + 1 < pairs else len(order)] for i in range(pairs)]


def survives(nodes: int, copies: int, lost: int) -> float:
    """The chance that `lost` nodes, any of them alike, leave a copy of everything; groups of `copies` nodes."""
    if nodes % copies or not 0 <= lost <= nodes:
        raise ValueError(f"{nodes} nodes in groups of {copies}, {lost} lost")
    groups = nodes // copies
    ways = sum(
        (-1) ** j * math.comb(groups, j) * math.comb(nodes - j * copies, lost - j * copies)
        for j in range(min(groups, lost // copies) + 1)
    )
    return ways / math.comb(nodes, lost)


def recovery_point(
    holdings: Mapping[int, Iterable[HeldCopy]], generation: int, world: int
) -> Recall | None:
    """The newest step of which the nodes still have every rank's copy; None: it has to be the disk."""
    places: dict[int, dict[int, list[tuple[int, HeldCopy]]]] = {}
    for node, copies in holdings.items():
        for copy in copies:
            if copy.generation == generation:
                places.setdefault(copy.step, {}).setdefault(copy.rank, []).append((node, copy))
    whole = [step for step, ranks in places.items() if set(range(world)) <= ranks.keys()]
    if not whole:
        return None
    step = max(whole)
    copies = tuple(
        Where(
            rank,
            tuple(node for node, _ in places[step][rank]),
            max(copy.check for _, copy in places[step][rank]),
        )
        for rank in range(world)
    )
    return Recall(step, generation, copies)


def newest_point(holdings: Mapping[int, Iterable[HeldCopy]]) -> tuple[Recall, int] | None:
    """The newest complete step over all generations, and its number of ranks."""
    copies = {node: list(copies_here) for node, copies_here in holdings.items()}
    kinds = {
        (copy.generation, copy.world)
        for copies_here in copies.values()
        for copy in copies_here
        if copy.world
    }
    points = [
        (point, world)
        for generation, world in kinds
        if (point := recovery_point(copies, generation, world)) is not None
    ]
    return max(
        points,
        key=lambda point: (point[0].step, point[0].generation),
        default=None,
    )
