"""When does a head draft, and how much? Its passes run where that saves time. Pure: seconds in, decisions out.

    plain     a few steps without drafts: how long does one take, the head's passes taken off?
    on        steps with as many drafts as their chances are worth: what do they bring, and how long do they take?
    off       where plain steps are faster; tried again after a while

What a further row costs depends on the machine and on the form of the weights, and what a head guesses on the text: so
both are measured. A head knows a text only if its passes ran from the prompt on; after `off` it waits for the next
request. Steps with about as many requests are judged together.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from cairn.serve.engine.speculate.guesses import (
    GuessCosts,
    Trust,
    least_chances,
    worth_verifying,
)

if TYPE_CHECKING:
    from cairn.serve.engine.request import Request

PLAIN_STEPS = 3
LEAST_STEPS = 6  # with drafts, before they are judged
LEAST_GAIN = 1.02  # tokens per second with drafts over those without, from which on a head pays
# What may be missing from that after a single step; the mean of n steps varies by the root of n less.
VARIATION = 0.5
MOST_COUNTED = 250
NEW = 0.01  # what the newest step counts for in a mean of many
REFRESH_STEPS = 128  # with drafts, until one without says again how long that takes
# Steps without the head, until it is tried again; twice as many after every trial in vain.
PATIENCE = 1024
MOST_PATIENCE = 16384

Phase = Literal["plain", "on", "off"]


class StepSeconds(Protocol):
    """Step-time model learned from measured steps; see `MeasuredSeconds`."""

    def __call__(self, tokens: int, /) -> float: ...

    def note(self, tokens: int, seconds: float) -> None: ...


class Mean:
    """Running mean that becomes a decaying mean with weight `new` for the newest value."""

    def __init__(self, new: float = NEW) -> None:
        self.value, self.count, self.new = 0.0, 0, new

    def add(self, number: float) -> None:
        self.count += 1
        self.value += max(self.new, 1 / self.count) * (number - self.value)


class Trial:
    """Is a head worth its time in steps with about so many requests?"""

    def __init__(self) -> None:
        self._patience = PATIENCE
        self._begin()

    def _begin(self) -> None:
        self.phase: Phase = "plain"
        self.plain_s, self.drafted_s, self.tokens = Mean(), Mean(), Mean()  # tokens of a request
        self._steps = self._since_plain = 0

    @property
    def verifies(self) -> bool:
        """May drafts be verified in the next step?"""
        return self.phase == "on" and self._since_plain < REFRESH_STEPS

    @property
    def rate(self) -> float:
        """Tokens of a request per second, with drafts or without, whichever are more; 0: not known yet."""
        ways = ((1.0, self.plain_s), (self.tokens.value, self.drafted_s))
        return max((tokens / mean.value for tokens, mean in ways if mean.value > 0), default=0.0)

    def note(
        self, guesses: bool, verified: bool, seconds: float, passes_s: float, tokens: float
    ) -> None:
        """A step has landed, which might verify drafts (`guesses`), and did or did not.

        `passes_s`: of `seconds`, those of the head's passes. `tokens`: that each request got.
        """
        if guesses:
            self.drafted_s.add(seconds)
            self.tokens.add(tokens)
        self._since_plain += 1
        if not verified:
            self.plain_s.add(seconds - passes_s)
            self._since_plain = 0
        self._steps += 1
        self._judge()

    @property
    def pays(self) -> bool:
        counted = max(min(self.tokens.count, MOST_COUNTED), 1)
        gain = self.tokens.value * self.plain_s.value
        return gain >= (LEAST_GAIN - VARIATION / counted**0.5) * self.drafted_s.value

    def _judge(self) -> None:
        if self.phase == "plain" and self._steps >= PLAIN_STEPS:
            self.phase, self._steps = "on", 0
        elif self.phase == "on" and self.tokens.count >= LEAST_STEPS:
            if not self.pays:
                self.phase, self._steps = "off", 0
            elif self.tokens.count >= MOST_COUNTED:
                self._patience = PATIENCE
        elif self.phase == "off" and self._steps >= self._patience:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            self._begin()


class HeadPace:
    def __init__(self, seconds: StepSeconds, most: int) -> None:
        """`seconds`: of a step of so many tokens without passes. `most`: drafts of a request."""
        self.seconds, self.most, self.trust = seconds, most, Trust()
        self._trials: dict[int, Trial] = {}
        self._known: set[Request] = set()  # whose prompts the head has read
        self._pass_s = Mean(0.05)
        self._chances: dict[Request, Sequence[float]] = {}  # of the newest drafts
        self._in_flight: dict[Request, deque[Sequence[float]]] = {}

    def trial(self, requests: int) -> Trial:
        return self._trials.setdefault(max(requests, 1).bit_length(), Trial())

    def verifies(self, decoding: Collection["Request"]) -> bool:
        """May drafts of the head be worth verifying in the next step?"""
        known = not self._known.isdisjoint(decoding)
        return known and self.trial(len(decoding)).verifies

    def runs(self, requests: Collection["Request"], admitted: Iterable["Request"]) -> bool:
        """Do its passes run behind a step of these requests, of which some begin?"""
        if self.trial(len(requests)).phase == "off":
            self._known.difference_update(requests)  # what comes now it will not know
            return False
        self._known.update(admitted)
        return not self._known.isdisjoint(requests)

    def least(self, requests: int) -> list[float]:
        """The chances from which on further passes are made behind a step of so many requests."""
        return least_chances(self._costs(requests), self.trust.factor)

    def guesses(self, request: "Request", requests: int) -> int:
        """Number of the request's newest drafts to verify in a step of this size."""
        factor = self.trust.factor
        chances = [min(factor * chance, 1.0) for chance in self._chances.get(request, ())]
        return worth_verifying(chances, self._costs(requests))

    def _costs(self, requests: int) -> GuessCosts:
        steps_s = [self.seconds(requests * (1 + n)) for n in range(self.most + 1)]
        rate = self.trial(requests).rate or 1 / steps_s[0]
        return GuessCosts(rate, steps_s, self._pass_s.value)

    def drafted(
        self, requests: Sequence["Request"], chances: Sequence[Sequence[float]], passes_s: float
    ) -> None:
        """A step was launched: the chances of what the head has drafted behind it, 0 where it stopped."""
        self._chances = dict(zip(requests, chances, strict=True))
        if not requests:
            return
        passes = max((sum(chance > 0 for chance in own) for own in chances), default=0)
        self._pass_s.add(passes_s / max(passes, 1))

    def launched(self, request: "Request", drafts: int) -> None:
        """A step verifies so many of its newest drafts."""
        chances = self._chances.get(request, ())[:drafts]
        self._in_flight.setdefault(request, deque()).append(chances)

    def landed(self, request: "Request", held: int) -> None:
        """Record the number of accepted drafts of the oldest step in flight."""
        if launched := self._in_flight.get(request):
            self.trust.note(launched.popleft(), held)

    def finish(self, request: "Request") -> None:
        self._known.discard(request)
        self._chances.pop(request, None)
        self._in_flight.pop(request, None)
