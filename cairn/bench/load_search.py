"""Chooses the next rate to try, in the search for the highest one that holds an SLO.

    holds   holds            broken        broken
    |-------|-------?--------|-------------|-------> requests per second
            best   next      worst

With two bounds both are tried first; with one, the rate doubles until it breaks (or halves until it holds). Then the
middle, until best and worst are within the resolution. The SLO is taken to hold up to one rate and to break above it:
of two verdicts that contradict each other, the broken one at the lower rate counts. Pure: measures nothing, knows no
clock.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from cairn.core.errors import UsageError

MOST_STEPS = 24  # a server that still holds after so many doublings is not the limit
LOWEST = 16  # of a first guess, this part is tried and nothing below it
DIGITS = 3  # of a rate that was computed: people repeat it by hand


class Tried(NamedTuple):
    rate: float
    holds: bool


class Bracket(NamedTuple):
    """Between which rates the answer lies; None: not known."""

    best: float | None  # the highest that holds
    worst: float | None  # the lowest that does not

    def narrow(self, resolution: float) -> bool:
        return (
            self.best is not None
            and self.worst is not None
            and self.worst <= self.best * (1 + resolution)
        )


def bracket(tried: Sequence[Tried]) -> Bracket:
    worst = min((one.rate for one in tried if not one.holds), default=None)
    held = [one.rate for one in tried if one.holds and (worst is None or one.rate < worst)]
    return Bracket(max(held, default=None), worst)


def next_rate(
    tried: Sequence[Tried], low: float, high: float | None = None, resolution: float = 0.05
) -> float | None:
    """The next rate to measure, or None when the search is over and `bracket` has the result."""
    check_bounds(low, high, resolution)
    best, worst = found = bracket(tried)
    if not tried:
        return low
    if found.narrow(resolution) or len(tried) >= MOST_STEPS:
        return None
    if worst is None:
        assert best is not None
        if high is None:
            return best * 2
        return high if best < high else None
    if best is None:  # a lower bound that was given is one; a first guess is not
        return worst / 2 if high is None and worst > low / LOWEST else None
    middle = _rounded(math.sqrt(best * worst))
    return middle if best < middle < worst else None


def verdict(tried: Sequence[Tried]) -> str:
    """The answer as a sentence."""
    best, worst = bracket(tried)
    if best is None:
        return f"no rate was found that holds; {worst:g}/s is broken"
    if worst is None:
        return f"{best:g}/s holds, and no rate was found that does not"
    return f"the highest rate that holds is {best:g}/s; {worst:g}/s is broken"


def check_bounds(low: float, high: float | None, resolution: float) -> None:
    if not 0 < low < math.inf or (high is not None and not low < high < math.inf):
        bounds = f"{low:g}" if high is None else f"{low:g} and {high:g}"
        raise UsageError(
            f"a rate cannot be searched from {bounds}",
            hint="--rate LOW HIGH, both finite and HIGH above LOW; or --rate START",
        )
    if not 0.001 <= resolution <= 1:
        raise UsageError(
            f"--resolution is {resolution:g}", hint="between 0.001 and 1: 0.05 is five per cent"
        )


def _rounded(rate: float) -> float:
    return float(f"{rate:.{DIGITS}g}")
