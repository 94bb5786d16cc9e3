"""Work queue of objects: deduplicated, with back-off for failed ones. No clock."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

FIRST_S, LONGEST_S = 0.05, 30.0


class WorkQueue(Generic[Key]):
    """A key that is named while it is worked on is handed out again afterwards, never twice at once."""

    def __init__(self) -> None:
        self._waiting: dict[Key, None] = {}  # in order
        self._working: set[Key] = set()
        self._again: set[Key] = set()
        self._later: list[tuple[float, int, Key]] = []
        self._failures: dict[Key, int] = {}
        self._delayed = 0

    def add(self, key: Key) -> None:
        if key in self._working:
            self._again.add(key)
        else:
            self._waiting.setdefault(key)

    def add_later(self, key: Key, at_s: float) -> None:
        self._delayed += 1
        heapq.heappush(self._later, (at_s, self._delayed, key))

    def take(self, now_s: float) -> Key | None:
        while self._later and self._later[0][0] <= now_s:
            self.add(heapq.heappop(self._later)[2])
        if not self._waiting:
            return None
        key = next(iter(self._waiting))
        del self._waiting[key]
        self._working.add(key)
        return key

    def done(self, key: Key, now_s: float, failed: bool = False) -> None:
        self._working.discard(key)
        if failed:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            self.add_later(key, now_s + min(LONGEST_S, FIRST_S * 2 ** (failures - 1)))
        else:
            self._failures.pop(key, None)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def next_s(self) -> float | None:
        """When the next delayed key is due."""
        return self._later[0][0] if self._later else None

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._working or self._later)
