"""From the engine's thread to the event loop: what is new of the answers to one request, for one reader.

    engine's thread --on_news--> what is fresh, merged for each answer --bell--> await next() --> deltas

The news of one step ring the bell once, however many requests they belong to: waking a loop is what costs. A slow
reader finds one merged delta for each answer, so that it holds no more than the answer itself, and slows nobody down.
"""

import asyncio
import threading
from collections.abc import Callable

from cairn.serve.answer import CompletionOutput, extend
from cairn.serve.engine_thread import Job


class Bell:
    """Wakes readers of one event loop, all that are due with a single call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._due: list[Callable[[], None]] = []

    def ring(self, wake: Callable[[], None]) -> None:
        """From any thread."""
        with self._lock:
            self._due.append(wake)
            if len(self._due) > 1:  # somebody has rung already
                return
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # the loop is closed: nobody reads any more
            return

    def _answer(self) -> None:
        with self._lock:
            due, self._due = self._due, []
        for wake in due:
            wake()


class Following:
    """The answers to one request. `on_news` belongs to the engine's thread, everything else to the event loop's."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._lock = threading.Lock()
        self._fresh: dict[int, CompletionOutput] = {}
        self._rung = False
        self._reader: asyncio.Future[None] | None = None
        self._problem: BaseException | None = None

    def on_news(self, job: Job) -> None:
        delta = job.answer.take()
        with self._lock:
            held = self._fresh.get(delta.index)
            if held is None:
                self._fresh[delta.index] = delta
            else:
                extend(held, delta)
            if self._rung:
                return
            self._rung = True
        self._bell.ring(self.wake)

    async def next(self) -> list[CompletionOutput]:
        """What is new since the last call; at least one delta. Raises what `fail` was given."""
        while True:
            if self._problem is not None:
                raise self._problem
            if self._fresh:
                with self._lock:
                    fresh, self._fresh = self._fresh, {}
                    self._rung = False
                return list(fresh.values())
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def fail(self, problem: BaseException) -> None:
        """The reader gets this instead of more; the first one counts."""
        self._problem = self._problem or problem
        self.wake()

    def wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
