"""Index of earlier occurrences of the last tokens of growing texts. Pure Python.

    texts   a b c d a b e | a b c ...        places of the pair (a, b): 2, 6 in the first text, 2 in the second
    tail    .. x a b                         each place is compared backwards: how long is the match there?

Every pair of neighbouring tokens has a list of places, the newest last: one entry for each token, whatever the longest
match is. The counts of a suffix tree are those of the places; the tree itself, which has a node for every depth, is
never built.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

SHORTEST = 2  # tokens of a match
LONGEST = 24  # compared backwards
RECENT = 64  # places of a pair that are remembered


class Place(NamedTuple):
    """A match ends before token `at` of `text`."""

    text: list[int]
    at: int
    length: int  # tokens that match, at most `LONGEST`


class Occurrences:
    def __init__(self, recent: int = RECENT) -> None:
        self.recent = recent
        self._places: dict[tuple[int, int], deque[tuple[list[int], int]]] = {}

    def index(self, text: list[int], start: int) -> None:
        """Take in `text` from token `start` on; what is before it was taken in earlier."""
        places = self._places
        for at in range(max(start, 1), len(text)):
            pair = text[at - 1], text[at]
            known = places.get(pair)
            if known is None:
                known = places[pair] = deque(maxlen=self.recent)
            known.append((text, at + 1))

    def forget(self, text: list[int]) -> None:
        """Drop the oldest text, with all its places."""
        for pair in {(text[at - 1], text[at]) for at in range(1, len(text))}:
            known = self._places.get(pair)
            while known and known[0][0] is text:
                known.popleft()
            if not known:
                self._places.pop(pair, None)

    def matches(self, tail: Sequence[int]) -> list[Place]:
        """Places that end like `tail` and have a token behind them, newest first."""
        if len(tail) < SHORTEST:
            return []
        found = []
        for text, at in reversed(self._places.get((tail[-2], tail[-1]), ())):
            if at < len(text):
                found.append(Place(text, at, _matching(text, at, tail)))
        return found

    def __len__(self) -> int:
        return len(self._places)


def _matching(text: list[int], at: int, tail: Sequence[int]) -> int:
    most = min(at, len(tail), LONGEST)
    length = SHORTEST
    while length < most and text[at - 1 - length] == tail[-1 - length]:
        length += 1
    return length
