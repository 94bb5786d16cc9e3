"""Acceptance statistics of drafts: a decaying mean for each request, and counts by position. Pure Python.

What drafts rest on says much about them: of those behind a match of eight tokens nine in ten hold, of those behind two
tokens a half. So every kind has a mean of its own, and its own belief before the first.
"""

import itertools
from typing import NamedTuple

from cairn.serve.engine.request import MOST_DRAFTS

DECAY = 0.9  # what all earlier drafts count for, the belief too, when a step has verified some


class Kind(NamedTuple):
    """Type of drafts, with the prior of its acceptance rate."""

    start: float  # the chance that one holds
    weight: float  # drafts that this belief counts as
    rest: float  # what remains of the distance to it after a step without such drafts: they are tried again


ANY = Kind(0.5, 1.5, 0.985)
SHORT_MATCH = Kind(0.5, 4.0, 0.995)  # of 2 or 3 tokens in an earlier text
MATCH = Kind(0.7, 4.0, 0.995)
LONG_MATCH = Kind(0.85, 4.0, 0.995)  # of 8 tokens and more
FORCED = Kind(0.8, 4.0, 0.995)  # by a grammar, which forces text and not tokens


def kind_of_match(tokens: int) -> Kind:
    """Draft type for a match of this number of tokens."""
    if tokens < 4:
        return SHORT_MATCH
    return MATCH if tokens < 8 else LONG_MATCH


class Acceptance:
    """Acceptance rate of one request and draft type, conditional on the preceding drafts.

    Where nothing holds it falls by a tenth and more with every step, so drafts that cost little end soon, too. Where
    nothing is drafted it rises slowly to what was believed first: the more drafts cost, the later they are tried again.
    """

    __slots__ = ("held", "kind", "tried")

    def __init__(self, kind: Kind = ANY) -> None:
        self.kind, self.tried, self.held = kind, kind.weight, kind.start * kind.weight

    @property
    def rate(self) -> float:
        return self.held / self.tried

    def note(self, drafts: int, held: int) -> None:
        """Drafts behind the first that fails say nothing: they were not tried."""
        if drafts:
            self.tried = DECAY * self.tried + min(held + 1, drafts)
            self.held = DECAY * self.held + held
        else:
            start, weight, rest = self.kind
            self.tried = weight + rest * (self.tried - weight)
            self.held = start * weight + rest * (self.held - start * weight)


class Counts:
    """Counts over all requests since the start, with the definitions of vLLM's metrics."""

    def __init__(self) -> None:
        self.drafted = 0  # tokens
        self._of_held = [0] * (MOST_DRAFTS + 1)  # steps of a request in which exactly so many held

    def note(self, drafts: int, held: int) -> None:
        """A step of a request; one without drafts does not count."""
        if drafts:
            self.drafted += drafts
            self._of_held[held] += 1

    @property
    def runs(self) -> int:
        """Steps of a request that verified drafts."""
        return sum(self._of_held)

    @property
    def accepted(self) -> int:
        return sum(self.by_position)

    @property
    def by_position(self) -> list[int]:
        """Number of accepted drafts by position."""
        behind = itertools.accumulate(reversed(self._of_held[1:]))
        return [count for count in reversed(list(behind)) if count]

    @property
    def length(self) -> float:
        """Tokens that a verifying step brings a request on average, the one that is always drawn included."""
        return self.length_since(0, 0) or 1.0

    def length_since(self, runs: int, accepted: int) -> float | None:
        """The same since these were the counts; None: nothing was verified."""
        verified = self.runs - runs
        return 1 + (self.accepted - accepted) / verified if verified else None
