"""Policy for the number of head drafts made after a step and verified in the next one. Pure.

chances of a request's guesses      c1, c2, ..: what the head gives each, times how far it was right so far
n of them are expected to bring     c1 + c1 c2 + ..  tokens
and their step takes longer by      steps_s[n] - steps_s[0], which would bring `rate` times as many tokens otherwise
verified                            the n with the largest difference
a further pass of the head          where the chance that all guesses so far hold may be worth it
"""

from collections.abc import Sequence
from typing import NamedTuple

NEXT_CHANCE = 0.7  # of a guess that is not made yet, behind such that may hold
MEMORY = 0.98  # what an earlier run of guesses counts for
BELIEF = 8.0  # guesses that the belief in a head counts as
MOST_TRUST = 1.3


class GuessCosts(NamedTuple):
    rate: float  # tokens of a request per second by now
    steps_s: Sequence[float]  # of a step with 0, 1, 2, .. guesses of each request
    pass_s: float  # of a further pass


def worth_verifying(chances: Sequence[float], costs: GuessCosts) -> int:
    """The number of guesses that bring most, of as many as `costs` has steps for."""
    best, most, gain, held = 0, 0.0, 0.0, 1.0
    for count, (chance, step_s) in enumerate(zip(chances, costs.steps_s[1:], strict=False), 1):
        held *= chance
        gain += held
        worth = gain - costs.rate * (step_s - costs.steps_s[0])
        if worth > most:
            best, most = count, worth
    return best


def least_chances(costs: GuessCosts, trust: float) -> list[float]:
    """Thresholds on the head's confidence above which another draft pass is made, after 1, 2, ... drafts."""
    found, last = [], len(costs.steps_s) - 1
    for made in range(1, last):
        gain, bars = 0.0, []
        for further in range(1, last - made + 1):
            gain += NEXT_CHANCE**further
            seconds = costs.steps_s[made + further] - costs.steps_s[made] + further * costs.pass_s
            bars.append(costs.rate * seconds / gain)
        found.append(min(bars) / max(trust, 1e-3) ** made)
    return found


class Trust:
    """Calibration of the head's confidence: accepted over expected drafts, without those after a rejection."""

    def __init__(self) -> None:
        self._held = self._expected = BELIEF

    @property
    def factor(self) -> float:
        return min(self._held / self._expected, MOST_TRUST)

    def note(self, chances: Sequence[float], held: int) -> None:
        tried = min(held + 1, len(chances))
        self._held = MEMORY * self._held + held
        self._expected = MEMORY * self._expected + sum(chances[:tried])
