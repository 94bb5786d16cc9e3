"""Calls that the engine's workers have not answered yet: each number has a future until its `Returned` arrives.

A call is pause, sleep, new weights and the like (`messages.Call`). Knows neither processes nor threads: the client
sends the calls and hands in the answers.
"""

from concurrent.futures import Future

from cairn.core import errors
from cairn.core.errors import CairnError
from cairn.serve.engine.messages import EngineFailed, Failure, Returned


class PendingCalls:
    def __init__(self) -> None:
        self._futures: dict[int, Future[None]] = {}

    def __bool__(self) -> bool:
        return bool(self._futures)

    def add(self, number: int) -> Future[None]:
        future = self._futures[number] = Future[None]()
        return future

    def answer(self, returned: Returned) -> None:
        """An answer to a call that has failed in the meantime is dropped."""
        future = self._futures.pop(returned.call, None)
        if future is not None and returned.kind:
            future.set_exception(as_raised(returned))
        elif future is not None:
            future.set_result(None)

    def fail_all(self, problem: CairnError) -> None:
        futures, self._futures = self._futures, {}
        for future in futures.values():
            future.set_exception(problem)


def as_raised(failure: Failure | Returned) -> CairnError:
    """What the worker could not start with, or do, as if it had been raised here."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, CairnError):
        return kind(failure.message, failure.hint)
    message = f"{failure.kind}: {failure.message}"
    if isinstance(failure, Returned):
        return EngineFailed(message, failure.hint)
    return EngineFailed(f"the engine could not start: {message}", details=failure.traceback)
