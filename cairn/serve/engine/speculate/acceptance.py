"""How often drafts of a request hold: a decaying mean of each request, and counts by position of all. Pure Python."""

import itertools

from cairn.serve.engine.request import MOST_DRAFTS

START = 0.5  # believed of a request before the first draft
START_WEIGHT = 1.5  # drafts that this belief counts as
DECAY = 0.9  # what all earlier drafts count for, this belief too, when a step has verified some
REST = 0.985  # what remains of the distance to the belief after a step without drafts: they are tried again


class Acceptance:
    """Of one request: the chance that its next draft holds, given that those before it did.

    Where nothing holds it falls by a tenth and more with every step, so drafts that cost little end soon, too. Where
    nothing is drafted it rises slowly to what was believed first: the more drafts cost, the later they are tried again.
    """

    __slots__ = ("held", "tried")

    def __init__(self) -> None:
        self.tried, self.held = START_WEIGHT, START * START_WEIGHT

    @property
    def rate(self) -> float:
        return self.held / self.tried

    def note(self, drafts: int, held: int) -> None:
        """Drafts behind the first that fails say nothing: they were not tried."""
        if drafts:
            self.tried = DECAY * self.tried + min(held + 1, drafts)
            self.held = DECAY * self.held + held
        else:
            self.tried = START_WEIGHT + REST * (self.tried - START_WEIGHT)
            self.held = START * START_WEIGHT + REST * (self.held - START * START_WEIGHT)


class Counts:
    """Of all requests since the start, under the meanings that vLLM's metrics have."""

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
        """How often the first, second, .. draft held, as far as any did."""
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
