"""Is it faster to load the next pages of a prompt, to compute them, or both at once from both ends?

    places   found | ... computed meanwhile ... | ... loaded ... | ... computed afterwards ...
                  found                       first            last                          end

    seconds = max(compute(found .. first), load(first .. last)) + compute(last .. end)

"load" is first == found, "compute" is first == last, "both ends" is between: a page needs those before it to be
computed, but not to be loaded, so the front is computed while the tail arrives. Pure: seconds and bytes per second are
handed in; later calls hand in what was measured.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

import msgspec

from cairn.models.cache import CacheGroup

WORTH = 0.9  # a plan has to save a tenth, of computing and, from both ends, of loading: estimates are estimates
MOST_SLOWER = 8.0  # pages that load so many times more slowly than they are computed are not stored

Kind = Literal["load", "compute", "both ends"]
Compute = Callable[[int, int], float]  # seconds to compute from one place up to another


class Source(NamedTuple):
    """A tier as the gate sees it."""

    bytes_per_s: float
    wait_s: float  # until its first byte: latency, and what was asked for before


class Stored(NamedTuple):
    """A place whose pages are in a tier."""

    tier: int  # which of the sources
    bytes: int


class LoadPlan(NamedTuple):
    found: int
    first: int
    last: int
    seconds: float
    compute_s: float  # without any tier

    @property
    def kind(self) -> Kind:
        if self.first == self.last:
            return "compute"
        return "load" if self.first == self.found else "both ends"


class Loading(msgspec.Struct, eq=False):
    """Pages `first` .. `last` of a running request's table are on their way; those before `first` are computed."""

    first: int
    last: int
    began: float  # a moment
    state: Literal["coming", "landed", "failed"] = "coming"
    told: bool = False  # the device knows the table: the front is being computed


def plan_load(
    hit: int,
    places: Sequence[Stored],
    end: int,
    sources: Sequence[Source],
    compute: Compute,
    *,
    lasts: Collection[int] | None = None,
    both_ends: bool = True,
) -> LoadPlan:
    """`places`: behind `found`, one for each page that a tier has. `end`: pages of the whole prompt.

    `lasts`: where loading may end; by default behind the last place and wherever the tier changes.
    """
    alone = compute(hit, end)
    best = LoadPlan(hit, hit, hit, alone, alone)
    for last in lasts if lasts is not None else _lasts(hit, places):
        load = _load_seconds(places[: last - hit], sources)

        def wins(first: int, load: list[float] = load) -> bool:
            return compute(hit, first) >= load[first - hit]

        # Computing grows with `first` and loading shrinks: the best is where they cross, or just before.
        crossing = bisect_left(range(hit, last), True, key=wins) + hit if both_ends else hit
        whole = load[0] + compute(last, end)
        for first in sorted({hit, max(crossing - 1, hit), min(crossing, last - 1)}):
            seconds = max(compute(hit, first), load[first - hit]) + compute(last, end)
            bound = WORTH * alone if first == hit else WORTH * min(alone, whole)
            if seconds < min(best.seconds, bound):
                best = LoadPlan(hit, first, last, seconds, alone)
    return best


def worth_storing(bytes: int, source: Source, compute_s: float) -> bool:
    """Would loading this page ever help, at least from the far end?"""
    return bytes / source.bytes_per_s <= MOST_SLOWER * compute_s


def longest_stored(
    groups: Sequence[CacheGroup],
    page_size: int,
    hit: int,
    most: int,
    has: Callable[[int, int], bool],
) -> int:
    """The longest prefix in pages that the device and the tiers have together; `has(group, place)`: a tier has it."""
    last = most
    while last > hit:
        shorter = last
        for index, group in enumerate(groups):
            first = max(group.first_page(last * page_size, page_size), hit)
            missing = [place for place in range(first, last) if not has(index, place)]
            if (
                missing
            ):  # of a window the last one counts: every shorter prefix up to it needs it, too
                shorter = min(shorter, missing[0] if group.kind == "full" else missing[-1])
        if shorter == last:
            return last
        last = shorter
    return hit


def _lasts(hit: int, places: Sequence[Stored]) -> list[int]:
    count = len(places)
    changes = [at for at in range(1, count) if places[at].tier != places[at - 1].tier]
    return [hit + at for at in (*changes, *([count] if count else []))]


def _load_seconds(places: Sequence[Stored], sources: Sequence[Source]) -> list[float]:
    """Upper bound of the load time from each position on; tiers are read sequentially."""
    seconds, used = [0.0], set[int]()
    for place in reversed(places):
        source = sources[place.tier]
        wait = 0.0 if place.tier in used else source.wait_s
        used.add(place.tier)
        seconds.append(seconds[-1] + wait + place.bytes / source.bytes_per_s)
    return seconds[::-1]
