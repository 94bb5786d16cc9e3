"""Batching policy of text encoders.

Pure: no torch, no clock. Texts need no pages and are computed whole, so a batch is what fits into a budget of tokens:

    waiting  a(300) b(20) c(5000) d(40)  --budget 512-->  [a b]  then  [c]  then  [d]

In the order of priority, then of arrival: no text is passed by a later one of the same priority, so none starves.
"""

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

MANY_TOKENS = 2048  # more than products with few rows have
WARM_LENGTH = 64  # of a text, at most


class Text(Protocol):
    """Interface of a waiting text."""

    @property
    def tokens(self) -> int: ...

    @property
    def priority(self) -> int: ...


T = TypeVar("T", bound=Text)


class TextQueue(Generic[T]):
    """Texts that wait, by priority; first come, first served among equals."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, text: T) -> None:
        self._lines.setdefault(text.priority, deque()).append(text)
        self._count += 1

    def remove(self, text: T) -> None:
        self._lines[text.priority].remove(text)
        self._count -= 1

    def take(self, budget_tokens: int, most: int) -> list[T]:
        """The next batch: at least one text, however long it is; then as many as fit."""
        batch: list[T] = []
        left = budget_tokens
        for priority in sorted(self._lines):
            line = self._lines[priority]
            while line and len(batch) < most and (not batch or line[0].tokens <= left):
                left -= line[0].tokens
                batch.append(line.popleft())
            if line:
                break
            del self._lines[priority]
        self._count -= len(batch)
        return batch


def by_length(batch: Sequence[T]) -> list[T]:
    """Texts of equal length side by side, so that their attention is one product."""
    return sorted(batch, key=lambda text: text.tokens)


def warm_batches(budget_tokens: int, context: int) -> list[list[int]]:
    """Lengths of the texts of a small batch and of a large one; neither has more tokens than a batch may have.

    Two lengths in each, because texts of equal length have another attention.
    """
    length = min(context, WARM_LENGTH, max(budget_tokens // 2, 1))
    most = min(MANY_TOKENS + length, budget_tokens) // length
    return [[max(length - 1, 1), *[length] * (texts - 1)] for texts in (2, max(most, 2))]
