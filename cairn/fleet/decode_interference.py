"""Cost of a long prompt for concurrent answers, and whether it should wait for short ones. Pure.

    step of answers alone    |.|.|.|.|.                        a token each, `step_s` apart
    with chunks of a prompt  |....|....|....|....|.|.|         as long as it is computed, a token for each chunk

An answer with `left` tokens to come ends later by a chunk for each of them, or by the whole prompt if it lasts longer.
A prompt of half a second beside an answer of twenty tokens delays it by all of that, while the answer alone would have
been over in a tenth of a second. So a prompt may wait until answers have ended: what they save is known, and what the
wait costs is too. No prompt waits for an answer that takes longer than half of its own prompt, nor for any after it has
waited in the router for twice as long as its prompt takes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Protocol

MOST_WAIT = 0.5  # of the time of a prompt, for an answer to end
# Times as long as its prompt takes, for whatever; then it waits for no answer any more.
MOST_WAITED = 2.0


class UnderWay(Protocol):
    """A request that is at a server."""

    @property
    def answer_tokens(self) -> int:
        """Expected tokens of its answer."""
        ...

    @property
    def tokens_so_far(self) -> int: ...


class Answers:
    """Remaining answers of a server at one instant, shortest first."""

    def __init__(self, rests: Iterable[tuple[int, float]]) -> None:
        """`rests`: tokens that are left of each, and which share of the answer that is."""
        self._rests = sorted(rests)
        self.tokens_left = [left for left, _ in self._rests]
        # Sums over the first so many: of shares, and of what a second for each token would delay.
        self._shares = list(accumulate((share for _, share in self._rests), initial=0.0))
        self._delays = list(accumulate((left * share for left, share in self._rests), initial=0.0))

    def plus(self, tokens: int) -> "Answers":
        """Add an answer that has not started."""
        return Answers([*self._rests, (tokens, 1.0)])

    def delay_s(self, prompt_s: float, chunk_s: float, ended: int = 0) -> float:
        """Mean delay per token caused to the answers, without the first `ended` ones."""
        short = max(bisect_left(self.tokens_left, prompt_s / chunk_s), ended)
        of_short = chunk_s * (self._delays[short] - self._delays[ended])
        return of_short + prompt_s * (self._shares[-1] - self._shares[short])

    def wait(
        self,
        prompt_s: float,
        chunk_s: float,
        step_s: float,
        most_s: float,
        cost_of: Callable[[float], float],
    ) -> tuple[float, float]:
        """Optimal wait of a prompt (at most `most_s`), and the cost of waiting and delays.

        `cost_of`: so long a wait, to itself and to those behind it.
        """
        best_s, cost = 0.0, self.delay_s(prompt_s, chunk_s)
        for at, left in enumerate(self.tokens_left):
            wait_s = left * step_s
            if wait_s > most_s or wait_s >= cost:
                break
            found = cost_of(wait_s) + self.delay_s(prompt_s, chunk_s, at + 1)
            if found < cost:
                best_s, cost = wait_s, found
        return best_s, cost


def answers_of(requests: Iterable[UnderWay]) -> Answers:
    """Remaining answers; one that exceeds its expected length is expected to double."""
    rests: list[tuple[int, float]] = []
    for one in requests:
        tokens = max(one.answer_tokens, 1)
        left = tokens - one.tokens_so_far
        rests.append((left, left / tokens) if left > 0 else (tokens, 1.0))
    return Answers(rests)
