"""What all endpoints share: the engine, who is let in, what is counted; and one request on its way through them.

    body -> jobs -> Exchange: admitted -> submitted -> deltas ... -> the end, or nobody reads any more -> gone

However an exchange ends, its requests in the engine end with it: a client that leaves, a deadline, an exception.
Belongs to the thread of the event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from starlette.types import Receive, Scope, Send

from cairn.core.errors import CairnError
from cairn.core.metrics import Metrics
from cairn.models.tokenizer import Tokenizer
from cairn.serve.answer import CompletionOutput
from cairn.serve.engine_thread import Job
from cairn.serve.grammar import Grammars, grammars_for
from cairn.serve.http.admission import Admission, Rules, Ticket
from cairn.serve.http.backend import Backend
from cairn.serve.http.body import Gone
from cairn.serve.http.counts import Gaps, rendered, server_metrics, show_engine
from cairn.serve.http.following import Bell, Following
from cairn.serve.http.health import Progress
from cairn.serve.http.keys import Keys
from cairn.serve.http.protocol_answers import Health
from cairn.serve.http.refusal import Refusal
from cairn.serve.http.settings import ServerConfig

TICK_S = 1.0
LONG_TEXT = 8192  # characters; a longer one is tokenized beside the event loop
log = logging.getLogger("cairn")

MakeJobs = Callable[[Callable[[Job], None]], list[Job]]


class Call:
    """One HTTP request, as an endpoint gets it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, holder: str, id: str) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self.holder = holder  # of the API key
        self.id = id
        self.arrived = time.monotonic()

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of every answer."""
        return [(b"x-request-id", self.id.encode("latin-1", "replace"))]


class Service:
    def __init__(self, config: ServerConfig, backend: Backend, keys: Keys = Keys()) -> None:  # noqa: B008
        self.config, self.backend, self.keys = config, backend, keys
        self.model = config.names[0]
        self.created = int(time.time())
        self.metrics: Metrics = server_metrics(self.model)
        self.gaps = Gaps(self.model)
        rules = Rules(
            rows=backend.limits.rows, waiting=config.max_waiting, first_token_s=config.first_token_deadline,
            key_per_minute=config.key_requests_per_minute, key_at_once=config.key_concurrent_requests,
        )  # fmt: skip
        self.admission = Admission(rules)
        self.progress = Progress(config.progress_timeout)
        self.open: set[Exchange] = set()
        self._grammars = grammars_for(backend.opened, backend.limits.vocabulary)
        self._bell: Bell | None = None
        self._ticking: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """In the event loop that will serve."""
        self._bell = Bell(asyncio.get_running_loop())
        self._ticking = asyncio.create_task(self._tick())
        if self._grammars is not None:
            self._grammars.warm_up()  # in its own thread

    async def stop(self) -> None:
        """Everything has been answered, or has had its time."""
        if self._ticking is not None:
            self._ticking.cancel()
        if self._grammars is not None:
            self._grammars.close()
        await asyncio.to_thread(self.backend.engine.close)

    def drain(self) -> None:
        """Let nobody in any more; those inside have the grace to finish, and then end with what they have."""
        if not self.admission.draining:
            self.admission.draining = True
            asyncio.get_running_loop().call_later(self.config.drain_timeout, self.end_all)

    def end_all(self) -> None:
        for exchange in list(self.open):
            exchange.abort()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.health()  # so that it is known since when nothing moves

    # -- what endpoints ask ----------------------------------------------------------------------

    def health(self) -> Health:
        stats = self.backend.engine.stats()
        draining = self.admission.draining
        return self.progress.verdict(stats, bool(self.open), self.backend.dead(), draining)

    def metrics_text(self) -> str:
        show_engine(self.metrics, self.model, self.backend.engine.stats(), self.admission.inside)
        return rendered(self.metrics, self.gaps)

    def check_model(self, name: str | None) -> str:
        """The name to answer with."""
        if name is None:
            return self.model
        if name not in self.config.names:
            known = ", ".join(self.config.names)
            raise Refusal(404, f"there is no model {name[:200]!r}; this server has: {known}", param="model",
                          code="model_not_found")  # fmt: skip
        return name

    @property
    def tokenizer(self) -> Tokenizer:
        if self.backend.tokenizer is None:
            raise self._no_tokenizer()
        return self.backend.tokenizer

    def _no_tokenizer(self) -> Refusal:
        said = f"{self.model} has no tokenizer, so it reads and writes token ids only"
        return Refusal(400, said, code="no_tokenizer")

    @property
    def grammars(self) -> Grammars:
        if self._grammars is None:
            raise self._no_tokenizer()
        return self._grammars

    async def encode(self, text: str, special: bool = True) -> list[int]:
        if len(text) <= LONG_TEXT:
            return self.tokenizer.encode(text, special)
        return await asyncio.to_thread(self.tokenizer.encode, text, special)

    def exchange(self, call: Call, make_jobs: MakeJobs) -> "Exchange":
        if self._bell is None:
            raise RuntimeError("the service has not been started")
        return Exchange(self, call, make_jobs, Following(self._bell))


class Exchange:
    """One request from admission to its end. `async with` it, and call `next` until `finished`."""

    def __init__(
        self, service: Service, call: Call, make_jobs: MakeJobs, following: Following
    ) -> None:
        self._service, self._call, self._following = service, call, following
        self.jobs = make_jobs(following.on_news)  # refuses bad requests, before anything is taken
        self._left = len(self.jobs)
        self._ticket: Ticket | None = None
        self._watching: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._first = 0.0
        self._last_of: dict[int, float] = {}  # when an answer had its last news

    @property
    def finished(self) -> bool:
        return self._left == 0

    @property
    def cached(self) -> int:
        """Prompt tokens that were found in the cache."""
        return self.jobs[0].request.cached

    async def __aenter__(self) -> Self:
        service, config = self._service, self._service.config
        if (reason := service.backend.dead()) is not None:
            raise Refusal(
                503, f"the engine is not available: {reason}", code="engine_dead", retry_after_s=10
            )
        self._ticket = service.admission.admit(self._call.holder, len(self.jobs))
        service.open.add(self)
        try:
            service.backend.engine.submit(self.jobs)
        except CairnError as problem:  # it ended between the two lines
            self._close()
            raise Refusal(503, str(problem), code="engine_dead", retry_after_s=10) from None
        loop = asyncio.get_running_loop()
        self._watching = loop.create_task(self._watch())
        self._timers = [
            loop.call_later(config.first_token_deadline, self._miss_deadline),
            loop.call_later(config.request_timeout, self.abort),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    async def next(self) -> list[CompletionOutput]:
        """What is new: deltas, each of one answer. Raises Gone when nobody reads, Refusal when the engine failed."""
        deltas = await self._following.next()
        now = time.monotonic()
        for delta in deltas:
            self._note(delta, now)
            if delta.finish_reason == "error":
                raise self._failed(delta.error or "no reason was given")
        return deltas

    def abort(self) -> None:
        """End the answers where they are; the reader gets what there is."""
        left = [job.request.id for job in self.jobs if not job.answer.finished]
        if left:
            self._service.backend.engine.abort(left)

    # -- inside ----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Until the client leaves, which ends everything."""
        with suppress(asyncio.CancelledError):
            while (await self._call.receive())["type"] != "http.disconnect":
                pass
            self.abort()
            self._following.fail(Gone())

    def _miss_deadline(self) -> None:
        if not self._first:
            deadline = self._service.config.first_token_deadline
            self.abort()
            said = f"no token came within the deadline of {deadline:g} s"
            refusal = Refusal(503, said, code="deadline", retry_after_s=deadline)
            self._following.fail(refusal)

    def _failed(self, reason: str) -> Refusal:
        """It may work a moment later, or elsewhere: an engine that fell is started again."""
        if self._service.backend.dead() is not None:
            return Refusal(503, reason, code="engine_dead", retry_after_s=10)
        log.error("request %s failed: %s", self._call.id, reason)
        return Refusal(503, reason, code="engine_error", retry_after_s=1)

    def _note(self, delta: CompletionOutput, now: float) -> None:
        """Count, and give the ticket its news."""
        metrics, model = self._service.metrics, self._service.model
        before = self._last_of.get(delta.index)
        self._last_of[delta.index] = now
        if before is not None:
            self._service.gaps.add(now - before)
        else:
            if self._ticket is not None:
                self._ticket.first_token()
            if not self._first:
                self._first = now
                took = now - self._call.arrived
                metrics.observe("cairn_time_to_first_token_seconds", took, model=model)
        if delta.finish_reason is not None:
            self._left -= 1
            self._count_end(delta, now)

    def _count_end(self, delta: CompletionOutput, now: float) -> None:
        metrics, model = self._service.metrics, self._service.model
        job = next(job for job in self.jobs if job.answer.index == delta.index)
        tokens = len(job.answer.whole.token_ids)
        metrics.add("cairn_finished_requests_total", model=model, reason=delta.finish_reason or "")
        metrics.add("cairn_prompt_tokens_total", len(job.request.prompt), model=model)
        metrics.add("cairn_cached_prompt_tokens_total", job.request.cached, model=model)
        metrics.add("cairn_generated_tokens_total", tokens, model=model)
        metrics.observe("cairn_request_seconds", now - self._call.arrived, model=model)
        if tokens > 1:
            each = (now - self._first) / (tokens - 1)
            metrics.observe("cairn_time_per_output_token_seconds", each, model=model)

    def _close(self) -> None:
        self._service.open.discard(self)
        self.abort()  # whatever is left
        for timer in self._timers:
            timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        if self._ticket is not None:
            self._ticket.close()
