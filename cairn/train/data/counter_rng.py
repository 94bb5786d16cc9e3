"""Chance that is the same everywhere: numbers from a seed and a place, not from a generator with a state.

    mix(seed, 12, 3)                      one 64-bit number, the same on every machine and version of Python
    Dice(seed, 12).pick(["a", "b"])       a stream of choices that belongs to item 12 alone

Python's own `hash` and `random` promise this for a version only. Not for secrets.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """64 well-stirred bits of whole numbers; each word goes through splitmix64's finaliser."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state + 0x9E3779B97F4A7C15 + (word & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class Dice:
    """A stream of choices that depends on its words alone."""

    def __init__(self, *words: int) -> None:
        self._key = mix(*words)
        self._throws = 0

    def below(self, limit: int) -> int:
        """A whole number from 0 to limit - 1."""
        self._throws += 1
        return (mix(self._key, self._throws) * limit) >> 64  # the bias is below limit / 2^64

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both possible."""
        return low + self.below(high - low + 1)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def pick_some(self, choices: Sequence[T], count: int) -> list[T]:
        """`count` different ones, in random order."""
        left = list(choices)
        return [left.pop(self.below(len(left))) for _ in range(count)]


def words(text: str) -> list[str]:
    """Choices that are single words, written as one text."""
    return text.split()
