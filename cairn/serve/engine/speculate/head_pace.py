"""Does a head save time? Its passes run where a trial says so. Pure: seconds in, a decision out.

    plain     a few steps without drafts: how long does one take, the head's passes taken off?
    trial     a few steps with drafts: how many tokens do they bring, and how long do they take?
    on, off   whichever is faster; on is judged again with every step, off is tried again after a while

What a further row costs depends on the machine and on the form of the weights, and what a head guesses on the text: so
both are measured. A head knows a text only if its passes ran from the prompt on; a trial waits for the next request.
Steps with about as many requests have a trial of their own.
"""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cairn.serve.engine.request import Request

PLAIN_STEPS = 3
TRIAL_STEPS = 6
LEAST_GAIN = 1.02  # what saves less is not worth its risk
NEW = 0.1  # what the newest step counts for in a mean of many
REFRESH_STEPS = 128  # with drafts, until one without says again how long that takes
PATIENCE = (
    1024  # steps without the head, until it is tried again; twice as many after every trial in vain
)
MOST_PATIENCE = 16384

Phase = Literal["plain", "trial", "on", "off"]


class Mean:
    """Of the first numbers that come; then the newest count most."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, number: float) -> None:
        self.count += 1
        self.value += max(NEW, 1 / self.count) * (number - self.value)


class Trial:
    """Of steps with about as many requests."""

    def __init__(self) -> None:
        self.phase: Phase = "plain"
        self.plain_s, self.drafted_s, self.tokens = Mean(), Mean(), Mean()  # tokens of a request
        self._steps, self._patience = 0, PATIENCE

    @property
    def verifies(self) -> bool:
        """Are drafts verified in the next step?"""
        return self.phase == "trial" or (self.phase == "on" and self._steps % REFRESH_STEPS > 0)

    def note(self, verified: bool, seconds: float, passes_s: float, tokens: float) -> None:
        """A step has landed: did it verify drafts, what did it take, how much of that the head, what did it bring?"""
        if verified:
            self.drafted_s.add(seconds)
            self.tokens.add(tokens)
        else:
            self.plain_s.add(seconds - passes_s)
        if verified or self.phase != "trial":
            self._steps += 1
            self._judge()

    @property
    def pays(self) -> bool:
        return self.tokens.value * self.plain_s.value >= LEAST_GAIN * self.drafted_s.value

    def _judge(self) -> None:
        if self.phase == "plain" and self._steps >= PLAIN_STEPS:
            self._enter("trial")
        elif self.phase == "trial" and self._steps >= TRIAL_STEPS:
            self._enter("on" if self.pays else "off")
        elif self.phase == "on" and not self.pays:
            self._enter("off")
        elif self.phase == "off" and self._steps >= self._patience:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            self.plain_s, self.drafted_s, self.tokens = Mean(), Mean(), Mean()
            self._enter("plain")

    def _enter(self, phase: Phase) -> None:
        if phase == "on":
            self._patience = PATIENCE
        self.phase, self._steps = phase, 0 if phase != "on" else 1


class HeadPace:
    def __init__(self) -> None:
        self._trials: dict[int, Trial] = {}
        self._known: set[Request] = set()  # whose prompts the head has read

    def trial(self, requests: int) -> Trial:
        return self._trials.setdefault(max(requests, 1).bit_length(), Trial())

    def verifies(self, decoding: Collection["Request"]) -> bool:
        """Are drafts of the head worth verifying in the next step?"""
        known = not self._known.isdisjoint(decoding)
        return known and self.trial(len(decoding)).verifies

    def runs(self, requests: Collection["Request"], admitted: Iterable["Request"]) -> bool:
        """Do its passes run behind a step of these requests, of which some begin?"""
        if self.trial(len(requests)).phase == "off":
            self._known.difference_update(requests)  # what comes now it will not know
            return False
        self._known.update(admitted)
        return not self._known.isdisjoint(requests)

    def finish(self, request: "Request") -> None:
        self._known.discard(request)
