r"""Delivery of new output of a request from the engine's thread to an event loop.

    engine's thread --on_update--> which answers are fresh --LoopWaker--> await next() --> deltas
                                                                     \--> forward(push): push(deltas), without a task

The updates of one step wake the loop once, however many requests they belong to: waking a loop is what costs. The text
stays in the answers until the reader takes it: a slow reader gets one larger delta for each answer, so it needs no more
memory than the answer itself and delays no other.

Nothing here takes a lock, because there is one call for every token of every answer. Instead each side writes its mark
before it reads the other's: the engine's thread marks an answer as fresh and then checks whether the loop has been
woken; the event loop clears that flag and then looks for fresh answers. At worst a reader is woken for nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from cairn.serve.answer import CompletionOutput
from cairn.serve.job import Job

Push = Callable[[list[CompletionOutput]], bool]


class LoopWaker:
    """Runs callbacks in an event loop's thread; all that are due share a single wake-up of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: deque[Callable[[], None]] = deque()
        self._woken = False

    def call(self, callback: Callable[[], None]) -> None:
        """Schedule a callback in the loop. Thread-safe."""
        self._due.append(callback)
        if self._woken:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._run)
        except RuntimeError:  # the loop is closed: nothing is read any more
            return

    def _run(self) -> None:
        self._woken = False
        due = self._due
        while due:
            due.popleft()()


class AnswerReader:
    """The answers to one request. `on_update` may be called in another thread, everything else in the event loop's."""

    __slots__ = (
        "_error",
        "_forwarding",
        "_fresh",
        "_future",
        "_scheduled",
        "_waker",
        "same_thread",
    )

    def __init__(self, waker: LoopWaker | None = None, same_thread: bool = False) -> None:
        """`same_thread`: updates come in the event loop's own thread, so that a single answer needs no wake-up."""
        self._waker, self.same_thread = waker, same_thread
        self._fresh: dict[Job, None] = {}  # a change is one operation
        self._scheduled = False  # a wake-up is on its way
        self._future: asyncio.Future[None] | None = None
        self._forwarding: Callable[[], None] | None = None
        self._error: BaseException | None = None

    def on_update(self, job: Job) -> None:
        self._fresh[job] = None
        if self.same_thread:
            self.wake()
        elif self._waker is not None and not self._scheduled:
            self._scheduled = True
            self._waker.call(self.wake)

    async def next(self) -> list[CompletionOutput]:
        """Wait for new deltas since the last call (at least one). Raises the error given to `fail`."""
        if self._waker is None:  # bound to the first event loop that reads
            self._waker = LoopWaker(asyncio.get_running_loop())
        while True:
            if self._error is not None:
                raise self._error
            if deltas := self._take():
                return deltas
            self._future = asyncio.get_running_loop().create_future()
            await self._future

    async def forward(self, push: Push) -> None:
        """Call `push` with what is new whenever the loop is woken, until it returns False or `fail` is called.

        `push` is called between tasks: it returns at once. What it raises is raised here.
        """
        stopped = asyncio.get_running_loop().create_future()

        def forward_once() -> None:
            if stopped.done():  # cancelled
                return
            try:
                deltas = self._take()
                if self._error is not None or (deltas and not push(deltas)):
                    self._forwarding = None
                    stopped.set_result(None)
            except Exception as error:  # noqa: BLE001  raised in the coroutine that waits below
                self._forwarding = None
                stopped.set_exception(error)

        self._forwarding = forward_once
        try:
            forward_once()  # what came before it was set
            await stopped
        finally:
            self._forwarding = None

    def fail(self, error: BaseException) -> None:
        """The reader gets this instead of more; the first one counts."""
        self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        if self._forwarding is not None:
            self._forwarding()
            return
        future, self._future = self._future, None
        if future is not None and not future.done():
            future.set_result(None)

    def _take(self) -> list[CompletionOutput]:
        self._scheduled = False
        fresh, deltas = self._fresh, []
        while fresh:
            answer = fresh.popitem()[0].answer
            if answer.has_update:  # else it was taken with an earlier one
                deltas.append(answer.take())
        return deltas
