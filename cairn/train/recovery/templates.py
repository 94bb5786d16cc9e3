"""Fallback layouts for fewer ranks, computed before any failure.

    8 ranks  dp 4 x pp 2      7, 6 ranks  dp 3 x pp 2      5, 4  dp 2 x pp 2      3, 2  dp 1 x pp 2      1  alone

Every count has its template (Oobleck, SOSP 2023), and moving to it only moves bytes: a copy in memory is read by any
layout. Oobleck also mixes pipelines of different depth (`cover`); our ranks form a full grid, so a template is one
depth for all. The batch of a step never changes, so neither do the samples. Pure, no torch.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import msgspec

from cairn.core.errors import CairnError
from cairn.train.parallel.layout import Layout

Fits = Callable[[Layout], bool]  # whether a layout can run at all: divisors, layers, batch


def templates(layout: Layout, fits: Fits) -> dict[int, Layout]:
    """The best fitting layout for each number of ranks up to the layout's; counts without one are omitted."""
    by_ranks: dict[int, Layout] = {}
    for ranks in range(1, layout.world() + 1):
        best = best_for(layout, ranks, fits)
        if best is not None:
            by_ranks[ranks] = best
    return by_ranks


def best_for(layout: Layout, ranks: int, fits: Fits) -> Layout | None:
    """The layout with the most ranks; on a tie the one with the least memory per rank."""
    if ranks >= layout.world():
        return layout
    candidates = [one for one in variants(layout) if one.world() <= ranks and fits(one)]
    if not candidates:
        return None
    return max(candidates, key=lambda one: (one.world(), one.pp * one.fsdp, one.pp, one.ep))


def shrunk(layout: Layout, ranks: int, fits: Fits) -> Layout | None:
    """The same layout with fewer replicas: nothing but dp changes."""
    for dp in range(min(layout.dp - 1, ranks), 0, -1):
        smaller = msgspec.structs.replace(layout, dp=dp)
        if smaller.world() <= ranks and fits(smaller):
            return smaller
    return None


def variants(layout: Layout) -> Iterator[Layout]:
    """Fewer replicas, shallower pipelines, smaller shards; tp and cp stay, because the hosts are wired for them."""
    for pp in range(layout.pp, 0, -1):
        for fsdp in range(layout.fsdp, 0, -1):
            for dp in range(max(layout.world() // (pp * fsdp * layout.tp * layout.cp), 1), 0, -1):
                ep = layout.ep if (dp * fsdp) % layout.ep == 0 else 1
                yield msgspec.structs.replace(layout, dp=dp, pp=pp, fsdp=fsdp, ep=ep)


def fitting(check: Callable[[Layout], None]) -> Fits:
    """Convert a check that raises to a predicate."""

    def fits(layout: Layout) -> bool:
        try:
            check(layout)
        except CairnError:
            return False
        return True

    return fits


def cover(nodes: int, sizes: Sequence[int], rate: Callable[[int], float]) -> list[int]:
    """Pipelines of these sizes that use up to `nodes` nodes with the highest total rate (Oobleck's choice).

    Empty if not even the smallest fits.
    """

    @cache
    def best(left: int) -> tuple[float, tuple[int, ...]]:
        options = [
            (rate(size) + best(left - size)[0], (size, *best(left - size)[1]))
            for size in sizes
            if size <= left
        ]
        return max(options, default=(0.0, ()))

    return sorted(best(nodes)[1], reverse=True)
