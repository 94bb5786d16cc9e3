"""The answers to one prompt while they are made: `async for output in llm.stream(prompt)`.

    engine's thread --delta--> deque --wake--> __anext__ --> RequestOutput, as far as it has come

Every output holds everything so far, and in `new_text` what is new. A reader that is slow gets several tokens at once,
and slows nobody down. A stream that is left (break, an exception, a cancelled task, aclose) ends its requests in the
engine. When an answer has failed, the stream ends with its error, after everything that there is was given out.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from msgspec.structs import replace

from cairn.core.errors import CairnError
from cairn.serve.answer import CompletionOutput, RequestOutput, extend, readable_prompt
from cairn.serve.engine.request import RequestId
from cairn.serve.engine_thread import Job

Abort = Callable[[Sequence[RequestId]], None]


class Stream:
    """An asynchronous iterator. Its first use binds it to the event loop that is running then."""

    def __init__(self, known: RequestOutput, abort: Abort) -> None:
        self.known = known  # what has been given out so far
        self.jobs: list[Job] = []
        self._abort = abort
        self._news: deque[CompletionOutput] = deque()
        self._bound: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._closed = False

    def on_news(self, job: Job) -> None:
        """In the engine's thread: leave the delta, and wake the reader if there is one."""
        self._news.append(job.answer.take())
        bound = self._bound
        if bound is not None:
            loop, event = bound
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # the loop is closed, and nobody reads any more
                return

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._closed:
            raise StopAsyncIteration
        if self.known.finished and not self._news:
            self._leave()
            failed = next((one.error for one in self.known.outputs if one.error), None)
            raise StopAsyncIteration if failed is None else CairnError(failed)
        try:
            await self._wait()
        except BaseException:  # cancelled: nobody will read the rest
            self._leave()
            raise
        self._take_in()
        return snapshot(self.known)

    async def aclose(self) -> None:
        """Leave: what has not been computed yet will not be."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if not self._closed:
            self._closed = True
            left = [job.request.id for job in self.jobs if not job.answer.finished]
            if left:
                self._abort(left)

    async def _wait(self) -> None:
        if self._bound is None:
            self._bound = asyncio.get_running_loop(), asyncio.Event()
        event = self._bound[1]
        while not self._news:
            event.clear()
            if self._news:  # came between the two lines above
                return
            await event.wait()

    def _take_in(self) -> None:
        for output in self.known.outputs:
            output.new_text = ""
        while self._news:
            delta = self._news.popleft()
            extend(self.known.outputs[delta.index], delta)
        first = self.jobs[0]
        self.known.num_cached_tokens = first.request.cached
        self.known.embedding = vector_of(first.pooled)
        if first.prompt_logprobs is not None and self.known.prompt_logprobs is None:
            self.known.prompt_logprobs = readable_prompt(
                first.request.prompt, first.prompt_logprobs, first.answer.tokenizer
            )


def vector_of(pooled: bytes | None) -> list[float] | None:
    return None if pooled is None else array("f", pooled).tolist()


def snapshot(known: RequestOutput) -> RequestOutput:
    """A copy that later tokens do not change."""
    outputs = []
    for one in known.outputs:
        logprobs = None if one.logprobs is None else list(one.logprobs)
        outputs.append(replace(one, token_ids=list(one.token_ids), logprobs=logprobs))
    return replace(known, outputs=outputs)
