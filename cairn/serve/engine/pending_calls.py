"""Calls that the engine's workers have not answered yet: each number has a future until its `Returned` arrives.

A call is pause, sleep, new weights and the like (`messages.Call`). Each has a limit in seconds: workers carry it out
between two steps, so one that takes longer means that they hang. Knows neither processes nor threads: the client sends
the calls and hands in the answers.
"""

import time
from concurrent.futures import Future
from typing import NamedTuple

from cairn.core import errors
from cairn.core.errors import CairnError
from cairn.serve.engine.messages import EngineFailed, Failure, Returned


class Pending(NamedTuple):
    future: Future[None]
    what: str
    limit_s: float
    since: float
    beside: bool  # steps go on meanwhile


class PendingCalls:
    def __init__(self) -> None:
        self._pending: dict[int, Pending] = {}

    @property
    def hold_steps(self) -> bool:
        """May an engine that takes no step be carrying out a call?"""
        return any(not pending.beside for pending in self._pending.copy().values())

    def add(self, number: int, what: str, limit_s: float, beside: bool = False) -> Future[None]:
        future = Future[None]()
        self._pending[number] = Pending(future, what, limit_s, time.monotonic(), beside)
        return future

    def overdue(self) -> list[tuple[int, Pending]]:
        now = time.monotonic()
        pending = self._pending.copy().items()
        return [(number, one) for number, one in pending if now - one.since > one.limit_s]

    def answer(self, returned: Returned) -> None:
        """An answer to a call that has failed in the meantime is dropped."""
        pending = self._pending.pop(returned.call, None)
        if pending is not None and returned.kind:
            pending.future.set_exception(as_raised(returned))
        elif pending is not None:
            pending.future.set_result(None)

    def fail(self, number: int, problem: CairnError) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.future.set_exception(problem)

    def fail_all(self, problem: CairnError) -> None:
        for number in list(self._pending):
            self.fail(number, problem)


def as_raised(failure: Failure | Returned) -> CairnError:
    """Convert a failure reported by a worker to an exception."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, CairnError):
        return kind(failure.message, failure.hint)
    message = f"{failure.kind}: {failure.message}"
    if isinstance(failure, Returned):
        return EngineFailed(message, failure.hint)
    return EngineFailed(f"the engine could not start: {message}", details=failure.traceback)
