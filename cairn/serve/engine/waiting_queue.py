"""Queue of waiting requests in admission order.

    fcfs       (priority, arrival)
    shortest   (priority, prompt length, arrival)

A preempted request keeps its arrival, and so returns to the place that it had. The line is strict: when its first
request does not fit, none overtakes it. It knows nothing about pages or rows.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from cairn.serve.engine.request import Policy, Request

Place = tuple[int, int, int]
Entry = tuple[int, int, int, Request]  # arrivals differ, so two requests are never compared


class WaitingQueue:
    """A sorted list with its head at the end, where a list is cheap to shorten."""

    def __init__(self, policy: Policy) -> None:
        self._shortest = policy == "shortest"
        self._line: list[Entry] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in reversed(self._line))

    def __contains__(self, request: Request) -> bool:
        at = self._position(request)
        return at < len(self._line) and self._line[at][-1] is request

    @property
    def head(self) -> Request:
        return self._line[-1][-1]

    def push(self, request: Request) -> None:
        insort(self._line, (*self._place(request), request))

    def pop(self) -> Request:
        return self._line.pop()[-1]

    def remove(self, request: Request) -> None:
        if request not in self:
            raise ValueError(f"{request!r} is not waiting")
        del self._line[self._position(request)]

    def _place(self, request: Request) -> Place:
        """Negated: the smallest comes last."""
        length = len(request.prompt) if self._shortest else 0
        return -request.priority, -length, -request.arrival

    def _position(self, request: Request) -> int:
        return bisect_left(self._line, self._place(request), key=lambda entry: entry[:3])
