r"""From the engine to the event loop: what is new of the answers to one request, for one reader.

    engine's thread --on_news--> which answers have news --bell--> await next() --> deltas
                                                              \--> pour(push): push(deltas), with no task in between

The news of one step ring the bell once, however many requests they belong to: waking a loop is what costs. The text
stays where it is made, in the answers, until the reader comes for it: a slow reader finds one larger delta for each
answer, so that it costs no more than the answer itself, and slows nobody down.

Nothing here takes a lock, because there is one call for every token of every answer. Instead each side leaves its
trace before it looks for the other's: the engine's thread says what is new and then looks whether the bell has been
rung; the event loop takes the bell back and then looks what is new. At worst a reader is woken for nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from cairn.serve.answer import CompletionOutput
from cairn.serve.engine_thread import Job

Push = Callable[[list[CompletionOutput]], bool]


class Bell:
    """Wakes readers of one event loop, all that are due with a single call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: deque[Callable[[], None]] = deque()
        self._rung = False

    def ring(self, wake: Callable[[], None]) -> None:
        """From any thread."""
        self._due.append(wake)
        if self._rung:
            return
        self._rung = True
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # the loop is closed: nobody reads any more
            return

    def _answer(self) -> None:
        self._rung = False
        due = self._due
        while due:
            due.popleft()()


class Following:
    """The answers to one request. `on_news` may be called in another thread, everything else in the event loop's."""

    __slots__ = ("_bell", "_fresh", "_pouring", "_problem", "_reader", "_rung", "here")

    def __init__(self, bell: Bell, here: bool = False) -> None:
        """`here`: news come in the event loop's own thread; a single answer needs no bell then."""
        self._bell, self.here = bell, here
        self._fresh: dict[Job, None] = {}  # have news; a change is one operation
        self._rung = False
        self._reader: asyncio.Future[None] | None = None
        self._pouring: Callable[[], None] | None = None
        self._problem: BaseException | None = None

    def on_news(self, job: Job) -> None:
        self._fresh[job] = None
        if self.here:
            self.wake()
        elif not self._rung:
            self._rung = True
            self._bell.ring(self.wake)

    async def next(self) -> list[CompletionOutput]:
        """What is new since the last call; at least one delta. Raises what `fail` was given."""
        while True:
            if self._problem is not None:
                raise self._problem
            if deltas := self._take():
                return deltas
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    async def pour(self, push: Push) -> None:
        """Hand over what is new as soon as the bell rings, until `push` says False or there is a problem for `next`.

        `push` is called between tasks: it returns at once. What it raises is raised here.
        """
        stopped = asyncio.get_running_loop().create_future()

        def turn() -> None:
            if stopped.done():  # cancelled
                return
            try:
                deltas = self._take()
                if self._problem is not None or (deltas and not push(deltas)):
                    self._pouring = None
                    stopped.set_result(None)
            except Exception as error:  # noqa: BLE001  it belongs to whoever waits below
                self._pouring = None
                stopped.set_exception(error)

        self._pouring = turn
        try:
            turn()  # for what came before it listened
            await stopped
        finally:
            self._pouring = None

    def _take(self) -> list[CompletionOutput]:
        self._rung = False
        fresh, deltas = self._fresh, []
        while fresh:
            answer = fresh.popitem()[0].answer
            if answer.has_news:  # else they were taken with those before
                deltas.append(answer.take())
        return deltas

    def fail(self, problem: BaseException) -> None:
        """The reader gets this instead of more; the first one counts."""
        self._problem = self._problem or problem
        self.wake()

    def wake(self) -> None:
        if self._pouring is not None:
            self._pouring()
            return
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
