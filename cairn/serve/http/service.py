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
from functools import partial
from types import TracebackType
from typing import Self

from cairn.core.errors import CairnError
from cairn.core.metrics import Metrics
from cairn.models.tokenizer import Tokenizer
from cairn.serve.answer import CompletionOutput
from cairn.serve.engine_thread import Job
from cairn.serve.grammar import FOLLOWED, Grammars, grammars_for
from cairn.serve.http.admission import Admission, Rules, Ticket
from cairn.serve.http.backend import Backend
from cairn.serve.http.body import Gone
from cairn.serve.http.call import Call
from cairn.serve.http.counts import (
    EngineTotals,
    Gaps,
    count_parts,
    rendered,
    server_metrics,
    show_engine,
)
from cairn.serve.http.following import Bell, Following, Push
from cairn.serve.http.health import Progress
from cairn.serve.http.keys import Keys
from cairn.serve.http.ledger import Entry
from cairn.serve.http.ledger_book import Book
from cairn.serve.http.ledger_engine import EngineLook
from cairn.serve.http.ledger_floor import Floors
from cairn.serve.http.ledger_otel import Traces, open_traces
from cairn.serve.http.ledger_reply import SaysLedger, wants_header
from cairn.serve.http.protocol_answers import Health
from cairn.serve.http.refusal import Refusal
from cairn.serve.http.settings import ServerConfig
from cairn.serve.http.views import RequestView

TICK_S = 1.0
LONG_TEXT = 8192  # characters; a longer one is tokenized beside the event loop
log = logging.getLogger("cairn")

MakeJobs = Callable[[Callable[[Job], None]], list[Job]]


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
        self.book = Book(Floors(backend.opened.spec, backend.facts))
        self.book.on_settled.append(partial(count_parts, self.metrics, self.model))
        self._traces: Traces | None = None
        if config.otel_endpoint is not None:
            self.send_traces(open_traces(config.otel_endpoint, self.model))
        self.look = EngineLook(self)
        self._totals = EngineTotals(self.model)
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
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    def send_traces(self, traces: Traces) -> None:
        """Every request that ends from now on becomes a span."""
        self._traces = traces
        self.book.on_settled.append(traces.tell)

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
            stats = self.backend.engine.stats()
            self.look.sample(stats)
            self._totals.count(self.metrics, stats)

    # -- what endpoints ask ----------------------------------------------------------------------

    def health(self) -> Health:
        stats = self.backend.engine.stats()
        draining = self.admission.draining
        return self.progress.verdict(stats, bool(self.open), self.backend.dead(), draining)

    def metrics_text(self) -> str:
        stats = self.backend.engine.stats()
        show_engine(self.metrics, self.model, stats, self.admission.inside)
        self._totals.count(self.metrics, stats)
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

    def exchange(
        self,
        call: Call,
        make_jobs: MakeJobs,
        *,
        stream: bool | None = None,
        ledger: bool | None = None,
    ) -> "Exchange":
        """`ledger`: the body asks for it."""
        if self._bell is None:
            raise RuntimeError("the service has not been started")
        call.streams, call.wants_field = bool(stream), bool(ledger)
        call.wants_ledger = call.wants_field or wants_header(call.scope)
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
        self._entry = self._begin()
        try:
            service.backend.engine.submit(self.jobs)
        except CairnError as problem:  # it ended between the two lines
            self._close("error")
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
        self._close(self._status(error))

    async def next(self) -> list[CompletionOutput]:
        """What is new: deltas, each of one answer. Raises Gone when nobody reads, Refusal when the engine failed."""
        self._entry.hand_over(time.monotonic())
        deltas = await self._following.next()
        self._note_all(deltas)
        return deltas

    async def pour(self, push: Push) -> None:
        """Hand what is new to `push` without waking this task for it, until it says False or all have ended."""

        def noted(deltas: list[CompletionOutput]) -> bool:
            self._note_all(deltas)
            more = push(deltas) and not self.finished
            self._entry.hand_over(time.monotonic())
            return more

        if not self.finished:
            await self._following.pour(noted)

    def abort(self) -> None:
        """End the answers where they are; the reader gets what there is."""
        left = [job.request.id for job in self.jobs if not job.answer.finished]
        if left:
            self._service.backend.engine.abort(left)

    # -- inside ----------------------------------------------------------------------------------

    def _begin(self) -> Entry:
        call, book = self._call, self._service.book
        entry = call.entry = book.begin(call.id, call.scope["path"], call.arrived, self.jobs)
        entry.parent, entry.streamed = call.traceparent, call.streams
        if call.wants_ledger:
            call.send = SaysLedger(call.send, self._view)
        return entry

    def _view(self) -> RequestView:
        """The ledger just before the last bytes leave."""
        return self._service.book.view(self._entry, about_to=self._status(None))

    def _status(self, error: BaseException | None) -> str:
        """How it ended, in a word."""
        if isinstance(error, Refusal):
            return "deadline" if error.code == "deadline" else "error"
        if error is not None:
            return "abort"
        reasons = {job.answer.whole.finish_reason or "abort" for job in self.jobs}
        return next((each for each in ("error", "abort", "length") if each in reasons), "stop")

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
        if FOLLOWED in reason:  # it led to where nothing is allowed: the request's fault, not ours
            return Refusal(400, reason, code="grammar_dead_end")
        log.error("request %s failed: %s", self._call.id, reason)
        return Refusal(503, reason, code="engine_error", retry_after_s=1)

    def _note_all(self, deltas: list[CompletionOutput]) -> None:
        now = self._entry.last = self._entry.handing = time.monotonic()
        for delta in deltas:
            self._note(delta, now)
            if delta.finish_reason == "error":
                raise self._failed(delta.error or "no reason was given")

    def _note(self, delta: CompletionOutput, now: float) -> None:
        """Count, and give the ticket its news."""
        metrics, model = self._service.metrics, self._service.model
        before = self._last_of.get(delta.index)
        self._last_of[delta.index] = now
        if before is not None:
            gap = now - before
            self._service.gaps.add(gap)
            if gap > self._entry.longest:
                self._entry.longest = gap
        else:
            if self._ticket is not None:
                self._ticket.first_token()
            if not self._first:
                self._first = self._entry.first = now
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

    def _close(self, status: str) -> None:
        self._service.open.discard(self)
        self._entry.close(status, time.monotonic())
        self.abort()  # whatever is left
        for timer in self._timers:
            timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        if self._ticket is not None:
            self._ticket.close()
