"""The answer of an engine in another process, for tests: read by a thread or a coroutine as it arrives.

for delta in submit(client, prompt, SamplingParams(max_tokens=64)):   # or: async for
    ...
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Self

import msgspec

from cairn.core.errors import CairnError
from cairn.serve.engine.client import EngineClient
from cairn.serve.engine.messages import Begun, Ended, Scored, Submit


class Delta(msgspec.Struct, frozen=True):
    """What has come since the last look: often one token, more for a slow reader."""

    tokens: list[int]
    logprobs: list[Scored]  # one for each token, if they were asked for
    prompt_logprobs: list[Scored] | None  # with the first token, if they were asked for
    ended: Ended | None  # the last Delta has it
    begun: Begun | None = None  # with the first token, unless it is the last one, too
    pooled: bytes | None = None  # the prompt as a vector of float32, if it was asked for


class Stream:
    """The answer to one request. Read it from one thread or one coroutine; leave its `with` early to abort it."""

    def __init__(self, id: int, abort: Callable[[int], None]) -> None:
        self.id = id
        self.ended: Ended | None = None
        self._abort = abort
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._future: asyncio.Future[None] | None = None
        self._clear()
        self._failed: CairnError | None = None
        self._over = False  # the last Delta has been read, or the failure raised

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while True:
            with self._lock:
                if (delta := self._take()) is not None:
                    return delta
                if self._over:
                    raise StopIteration
                self._event.clear()
            self._event.wait()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if (delta := self._take()) is not None:
                    return delta
                if self._over:
                    raise StopAsyncIteration
                future = self._future = loop.create_future()
            await future

    def abort(self) -> None:
        """End it; the stream then ends with the reason "abort", unless it has ended already."""
        if self.ended is None and self._failed is None:
            self._abort(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def _clear(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[Scored] = []
        self._prompt: list[Scored] | None = None
        self._begun: Begun | None = None
        self._pooled: bytes | None = None

    def _take(self) -> Delta | None:
        """Under the lock: what there is. Raises the failure when everything before it has been read."""
        if self._over:
            return None
        if self._tokens or self.ended is not None:
            delta = Delta(
                self._tokens, self._logprobs, self._prompt, self.ended, self._begun, self._pooled
            )
            self._clear()
            self._over = self.ended is not None
            return delta
        if self._failed is not None:
            self._over = True
            raise self._failed
        return None

    # -- for the client ----------------------------------------------------------------------------

    def begin(self, begun: Begun | None, prompt: list[Scored] | None, pooled: bytes | None) -> None:
        with self._lock:
            self._begun, self._prompt, self._pooled = begun, prompt, pooled

    def put(self, tokens: list[int], scored: list[Scored] | None, ended: Ended | None) -> None:
        with self._lock:
            self._tokens += tokens
            self._logprobs += scored or []
            self.ended = ended

    def end(self, ended: Ended) -> None:
        with self._lock:
            self.ended = ended

    def fail(self, problem: CairnError) -> None:
        with self._lock:
            self._failed = problem

    def wake(self) -> None:
        with self._lock:
            future, self._future = self._future, None
            self._event.set()
        if future is not None:
            future.get_loop().call_soon_threadsafe(lambda: future.done() or future.set_result(None))


def submit(client: EngineClient, prompt, params, **more) -> Stream:
    """`more`: priority, salt, guide, as `Submit` has them."""
    stream = Stream(client.new_number(), client.abort)
    client.submit(
        stream, Submit(stream.id, list(prompt), params, eos_ids=list(client.eos_ids), **more)
    )
    return stream
