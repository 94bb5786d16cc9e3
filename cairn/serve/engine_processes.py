"""The engine's processes behind the same three verbs as a thread has: submit, abort, close.

    job --submit--> EngineClient ~~ a worker for each GPU ~~> stream --a task each--> answer --on_news--> whoever waits

For models that several GPUs share. One thread runs an event loop with a task for every request, which makes its text.
When the workers fall, every request that was on its way ends with the reason; the client starts them again.
"""

import asyncio
import threading
from collections.abc import Sequence
from functools import partial

from cairn.core.errors import CairnError, ConfigError
from cairn.serve.config import EngineConfig
from cairn.serve.engine.client import EngineClient
from cairn.serve.engine.request import RequestId
from cairn.serve.engine.stream import Delta, Stream
from cairn.serve.engine_thread import Job

PATIENCE_S = 30.0  # to wait for the last words of requests when the engine is closed


class EngineProcesses:
    def __init__(self, config: EngineConfig) -> None:
        self.client = EngineClient(config)
        self._streams: dict[RequestId, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # a task that nobody holds may be collected
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cairn answers", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Put them in line. They have been checked: one that is refused now ends with an error."""
        if self._closed:
            raise ConfigError("the engine is closed", hint="make a new LLM")
        for job in jobs:
            request = job.request
            try:
                stream = self.client.submit(
                    request.prompt, request.params, priority=request.priority, salt=request.salt,
                    eos_ids=sorted(request.eos_ids), guide=job.guide,
                )  # fmt: skip
            except CairnError as problem:
                self._loop.call_soon_threadsafe(_fail, job, str(problem))
                continue
            self._streams[request.id] = stream
            self._loop.call_soon_threadsafe(self._begin, job, stream)

    def abort(self, ids: Sequence[RequestId]) -> None:
        for id in ids:
            if (stream := self._streams.get(id)) is not None:
                stream.abort()

    def close(self) -> None:
        """End everything that runs, and the processes. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.client.close(0.0)
        self._loop.call_soon_threadsafe(partial(self._loop.create_task, self._end()))
        if threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE_S)

    # -- in the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _end(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PATIENCE_S)
        self._loop.stop()

    def _begin(self, job: Job, stream: Stream) -> None:
        task = self._loop.create_task(self._follow(job, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, job: Job, stream: Stream) -> None:
        try:
            async for delta in stream:
                _take(job, delta)
                if job.answer.finished:
                    stream.abort()  # after a stop string; else it has ended, and this does nothing
                    break
                job.on_news(job)
        except CairnError as problem:
            job.answer.end("error", error=str(problem))
        del self._streams[job.request.id]
        job.on_news(job)


def _take(job: Job, delta: Delta) -> None:
    """Tokens, then the end; the last token is told that it is the last, because it may have no text."""
    ended = delta.ended
    if delta.prompt_logprobs is not None:
        job.prompt_logprobs = delta.prompt_logprobs
    by_token = ended is not None and ended.finish in ("stop", "length")
    for at, token in enumerate(delta.tokens):
        last = by_token and at == len(delta.tokens) - 1
        finish, reason = (ended.finish, ended.stop_reason) if ended and last else (None, None)
        scored = delta.logprobs[at] if delta.logprobs else None
        job.answer.push(token, finish, reason, scored)
        if job.answer.finished:
            break
    if ended is not None:
        job.request.cached = ended.cached
        job.answer.end(ended.finish, ended.stop_reason, ended.error)


def _fail(job: Job, error: str) -> None:
    job.answer.end("error", error=error)
    job.on_news(job)
