"""The engine's processes behind the same three verbs as a thread has: submit, abort, close.

    job --submit--> EngineClient ~~ a worker for each GPU ~~> stream --listener--> answer --on_news--> whoever waits

For models that several GPUs share, and for servers, whose sockets and texts must not make a device wait. Text is made
in the client's thread, where the tokens arrive: no task and no further thread for each request. When the workers fall,
every request that was on its way ends with the reason; the client starts them again.
"""

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

from cairn.core.errors import CairnError, ConfigError
from cairn.serve.config import EngineConfig
from cairn.serve.engine.client import EngineClient
from cairn.serve.engine.loop import described
from cairn.serve.engine.request import RequestId
from cairn.serve.engine.stream import Delta, Stream
from cairn.serve.engine_thread import Job

log = logging.getLogger("cairn")


class EngineProcesses:
    def __init__(self, config: EngineConfig) -> None:
        self.client = EngineClient(config)
        self._streams: dict[RequestId, Stream] = {}
        self._lock = threading.Lock()  # a stream may end before it is known here
        self._closed = False

    def submit(self, jobs: Sequence[Job]) -> None:
        """Put them in line. They have been checked: one that is refused now ends with an error."""
        if self._closed:
            raise ConfigError("the engine is closed", hint="make a new LLM")
        for job in jobs:
            request = job.request
            try:
                with self._lock:
                    self._streams[request.id] = self.client.submit(
                        request.prompt, request.params, priority=request.priority, salt=request.salt,
                        eos_ids=sorted(request.eos_ids), guide=job.guide, listener=partial(self._listen, job),
                    )  # fmt: skip
            except CairnError as problem:
                job.answer.end("error", error=str(problem))
                job.on_news(job)

    def abort(self, ids: Sequence[RequestId]) -> None:
        for id in ids:
            if (stream := self._streams.get(id)) is not None:
                stream.abort()

    def close(self) -> None:
        """End everything that runs, and the processes. May be called again."""
        if not self._closed:
            self._closed = True
            self.client.close(0.0)

    def _listen(self, job: Job, stream: Stream) -> None:
        """In the client's thread. Whatever goes wrong here ends this request and no other."""
        if job.answer.finished:  # by a stop string, and this came behind it
            return
        try:
            delta = stream.take()
            if delta is None:
                return
            _take(job, delta)
        except CairnError as problem:
            job.answer.end("error", error=str(problem))
        except Exception as problem:
            log.exception("the text of request %s could not be made", job.request.id)
            job.answer.end("error", error=described(problem))
        if job.answer.finished:
            with self._lock:
                self._streams.pop(job.request.id, None)
            stream.abort()  # after a stop string; else it has ended, and this does nothing
        job.on_news(job)


def _take(job: Job, delta: Delta) -> None:
    """Tokens, then the end; the last token is told that it is the last, because it may have no text."""
    ended, began = delta.ended, time.monotonic()
    if (known := ended or delta.begun) is not None:
        job.request.cached, job.request.ledger = known.cached, known.ledger
    if delta.prompt_logprobs is not None:
        job.prompt_logprobs = delta.prompt_logprobs
    job.pooled = delta.pooled or job.pooled
    by_token = ended is not None and ended.finish in ("stop", "length")
    for at, token in enumerate(delta.tokens):
        last = by_token and at == len(delta.tokens) - 1
        finish, reason = (ended.finish, ended.stop_reason) if ended and last else (None, None)
        scored = delta.logprobs[at] if delta.logprobs else None
        job.answer.push(token, finish, reason, scored)
        if job.answer.finished:
            break
    if ended is not None:
        job.answer.end(ended.finish, ended.stop_reason, ended.error)
    job.writing += time.monotonic() - began
