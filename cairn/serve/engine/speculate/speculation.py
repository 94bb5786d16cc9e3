"""What a scheduler asks a drafter, and what becomes of the drafts. Pure Python; knows no pages and no budget.

    guess --> drafts for the next step, and a guess of what is drawn behind them --land--> which tokens hold

`schedule` may run ahead of `update`, so a drafter is often asked while tokens are in flight. It is asked with what is
hoped for instead: `Request.hoped` is its guess of the first of `Request.expected` tokens. When a step lands otherwise
than hoped, drafts that follow it are most likely rejected, and the drafter starts again from what is known.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cairn.core.errors import ConfigError
from cairn.serve.engine.speculate.drafter import Drafter, accepted

if TYPE_CHECKING:
    from cairn.serve.engine.request import Limits, Request
    from cairn.serve.engine.step import Step

NO_DRAFTS: tuple[int, ...] = ()


class Speculation:
    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.drafted = self.accepted = 0  # drafts that were verified since the start, and that held

    def guess(self, request: "Request", most: int) -> list[int]:
        """What may follow the token that is computed next: up to `most` drafts, and one token more."""
        if request.params.pooling is not None:
            return []
        unguessed = request.expected - len(request.hoped)
        asked = unguessed + max(most, 0) + 1
        proposed = list(self.drafter.propose(request, request.hoped, asked))[:asked]
        if len(proposed) < unguessed:
            return []
        request.hoped += proposed[:unguessed]
        return proposed[unguessed:]

    def launch(self, request: "Request", drafts: int, guesses: Sequence[int] = ()) -> None:
        """A step draws a token for the request, and one behind each draft; `guesses` of all of them."""
        request.hoped += guesses[: 1 + drafts]
        request.expected += 1 + drafts
        request.drafted += drafts
        request.steps_in_flight += 1

    def land(self, step: "Step", drawn: Sequence[int]) -> list[tuple["Request", int]]:
        """Each request with each of its tokens that hold; what was computed for the others is given back."""
        drafts = step.drafts or [NO_DRAFTS] * len(step.sampling)
        pairs, at = [], 0
        for request, guessed in zip(step.sampling, drafts, strict=True):
            run = accepted(drawn[at : at + len(guessed) + 1], guessed)
            at += len(guessed) + 1
            pairs += [(request, token) for token in run]
            self._settle(request, run, len(guessed))
        return pairs

    def _settle(self, request: "Request", run: list[int], drafts: int) -> None:
        rejected = 1 + drafts - len(run)
        self.drafted += drafts
        self.accepted += drafts - rejected
        request.total -= rejected
        if request.state == "running":
            request.computed -= rejected
        request.drafted -= drafts
        request.steps_in_flight -= 1
        if not rejected and request.hoped[: len(run)] == run:
            del request.hoped[: len(run)]
            request.expected -= len(run)
        else:  # what was hoped for behind it does not follow; each step brings at least a token
            request.hoped.clear()
            request.expected = request.steps_in_flight


def speculation_of(drafter: Drafter | None, limits: "Limits") -> Speculation | None:
    """None: there is no drafter, or no room for drafts in a step."""
    if drafter is None or not limits.drafts:
        return None
    if any(group.kind == "state" for group in limits.groups):
        raise ConfigError(
            f"a step verifies {limits.drafts} drafts, and layers of this model keep a state",
            hint="a state cannot go back behind drafts that do not hold; serve it without a drafter",
        )
    return Speculation(drafter)
