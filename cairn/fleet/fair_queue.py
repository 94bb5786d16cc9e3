"""Fair queue for requests when no server has capacity: by priority, then by least service of the key.

    arrived(key)   add(request, model, key, priority)   take(next_model(models)) -> the next one   charge(key, tokens)

Virtual token counters (VTC, arXiv 2401.00588): each key counts what was computed for it, the tokens of prompts that
were cached nowhere and twice the tokens of answers. The lowest goes first, whichever model it wants. A key that comes
back after a pause starts at the lowest of those that wait, or where none waits at the key that was served last, so
that no key saves up, and none is charged later for what an idle fleet gave. Pure: no clock, no sockets.
"""

from collections import deque
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
OUTPUT_WEIGHT = 2  # of a token of an answer, against one of a prompt
MOST_KEYS = 10_000  # that are counted; more than that are counted from anew


class WaitingQueue(Generic[T]):
    def __init__(self) -> None:
        # Who waits: by model, then by (priority, key).
        self.models: dict[str | None, dict[tuple[int, str], deque[T]]] = {}
        self._place: dict[T, tuple[str | None, int, str]] = {}
        self._counts: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._served: str | None = None  # the key that was served last

    def __len__(self) -> int:
        return len(self._place)

    def __iter__(self) -> Iterator[T]:
        return iter(self._place)

    def waits(self, model: str | None) -> bool:
        return model in self.models

    def arrived(self, key: str) -> None:
        """Record a new request of a key. The service count of an idle key is raised to the current minimum."""
        if key == self._served and not self.models:
            return  # it is the lowest already
        if key not in self._counts:
            self._make_room()
        if not self.models:
            least = self._counts.get(self._served, 0.0) if self._served is not None else 0.0
        else:
            waiting = {one for line in self.models.values() for _, one in line}
            if key in waiting:
                return
            least = min(self._counts.get(one, 0.0) for one in waiting)
        if least > self._counts.get(key, 0.0):
            self._counts[key] = least

    def add(self, item: T, model: str | None, key: str, priority: int) -> None:
        self.arrived(key)
        line = self.models.setdefault(model, {})
        line.setdefault((priority, key), deque()).append(item)
        self._place[item] = model, priority, key

    def next_model(self, models: Collection[str | None]) -> str | None:
        """Model of the next request among those for these models."""
        heads = (
            (priority, self._counts.get(key, 0.0), at, model)
            for at, model in enumerate(models)
            for priority, key in self.models.get(model, ())
        )
        return min(heads)[3]

    def take(self, model: str | None) -> T | None:
        """The next one for this model."""
        for line in self.lines(model):
            item = line[0]
            self.remove(item)
            return item
        return None

    def lines(self, model: str | None) -> list[deque[T]]:
        """Waiting requests of a model by priority and key, oldest first; the next key first."""
        found = self.models.get(model, {})
        order = sorted(found, key=lambda one: (one[0], self._counts.get(one[1], 0.0)))
        return [found[one] for one in order]

    def remove(self, item: T) -> None:
        """Remove a request if it is waiting."""
        if (place := self._place.pop(item, None)) is None:
            return
        model, priority, key = place
        line = self.models[model]
        line[priority, key].remove(item)
        if not line[priority, key]:
            del line[priority, key]
        if not line:
            del self.models[model]

    def weigh(self, weights: dict[str, float]) -> None:
        """Keys that may have more than the others: twice as much at 2."""
        self._weights = weights

    def charge(self, key: str, prompt: int, output: int = 0) -> None:
        """So much was computed for it."""
        if key not in self._counts:
            self._make_room()
        tokens = (prompt + OUTPUT_WEIGHT * output) / self._weights.get(key, 1.0)
        self._counts[key] = self._counts.get(key, 0.0) + tokens
        if prompt:  # it was sent to a server now
            self._served = key

    def _make_room(self) -> None:
        if len(self._counts) >= MOST_KEYS:
            self._counts.clear()
