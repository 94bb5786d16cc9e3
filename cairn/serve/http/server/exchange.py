"""Handling of an HTTP request from admission to its end.

    GenerateRequest, ... --serving--> jobs -> admitted -> submitted -> deltas ... -> the end, or the client has left

    next     -> deltas -> bytes -> send, which waits for a slow client
    forward  -> deltas -> bytes -> send without a task, for as long as the client keeps up

However an exchange ends, its requests in the engine end with it: a client that leaves, a deadline, an exception.
Belongs to the thread of the event loop. How the events of a stream look is the endpoint's `Writer`.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

from cairn.core.errors import CairnError
from cairn.models.tokenizer import Tokenizer
from cairn.serve.answer import UNREADABLE, CompletionOutput
from cairn.serve.answer_reader import AnswerReader, Push
from cairn.serve.capture import digest_of, seeded
from cairn.serve.grammar import FOLLOWED
from cairn.serve.http.ledger.entry import Entry
from cairn.serve.http.ledger.reply import LedgerSend, wants_header
from cairn.serve.http.ledger.views import RequestView
from cairn.serve.http.protocol.answers import CachedTokens
from cairn.serve.http.protocol.body import Gone
from cairn.serve.http.protocol.refusal import Refusal, bug_found, refusal_of
from cairn.serve.http.server.admission import Ticket
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.continuation import (
    TOLD_EVERY_S,
    TokenMarks,
    can_move,
    continued,
    ends_already,
)
from cairn.serve.http.server.exchange_counts import ExchangeCounts, first_jobs
from cairn.serve.http.server.service import Service
from cairn.serve.http.server.sse import SSE
from cairn.serve.serving import GenerateRequest
from cairn.serve.token_marks import END

log = logging.getLogger("cairn")


class Writer(Protocol):
    """The events of one stream, as bytes."""

    def write(self, delta: CompletionOutput) -> bytes:
        """Empty: there is nothing to see yet."""
        ...

    def last(self) -> bytes:
        """When all answers have ended."""
        ...

    def refused(self, refusal: Refusal) -> bytes:
        """Instead of the rest."""
        ...


class Exchange:
    """Context manager of a request from admission to its end, used with `finish` or `stream`."""

    def __init__(
        self,
        service: Service,
        call: Call,
        requests: Sequence[GenerateRequest],
        model: str | None,
        *,
        stream: bool | None = None,
        ledger: bool | None = None,
    ) -> None:
        """Refuses bad requests, before anything is taken. `model`: its name; `ledger`: the body asks for it."""
        self._service, self._call = service, call
        call.streams, call.wants_field = bool(stream), bool(ledger)
        call.wants_ledger = call.wants_field or wants_header(call.scope)
        self._reader = AnswerReader(*service.reading)
        served = service.served(model)
        requests = [request._replace(served=served) for request in requests]
        if service.capture is not None:
            requests = [seeded(request) for request in requests]
        if call.continued:
            requests = [continued(requests, call.continued, call.streams)]
        self.jobs = service.serving.jobs(requests, self._reader.on_update, streamed=call.streams)
        self._submitted = [job for job in self.jobs if not (call.continued and ends_already(job))]
        self._left = len(self._submitted)
        if len(self.jobs) > 1:
            self._reader.same_thread = False  # several are written together
        self._ticket: Ticket | None = None
        self._watching: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._telling: asyncio.Task[None] | None = None
        self._broken = False  # an error ended its stream
        self._first = 0.0
        self._last_of: dict[int, float] = {}  # when an answer had its last update
        self._prompts = first_jobs(self.jobs)
        self._counts = ExchangeCounts(service.metrics, service.model, call.arrived, self.jobs)

    @property
    def finished(self) -> bool:
        return self._left == 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self._service.tokenizer

    @property
    def cached(self) -> int:
        """Prompt tokens that were found in the cache. Later answers to a prompt find what the first one computed."""
        return sum(job.request.cached for job in self._prompts.values())

    @property
    def prompt_details(self) -> CachedTokens:
        """Number of cached prompt tokens and of image tokens."""
        pieces = [piece for job in self._prompts.values() for piece in job.request.pieces]
        if not pieces:
            return CachedTokens(self.cached)
        return CachedTokens(self.cached, sum(piece.length for piece in pieces))

    @property
    def moved(self) -> int:
        """Tokens of its answer that another server has made."""
        return len(self._call.continued)

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds from arrival to the first token, and from there to the last."""
        entry = self._entry
        return max(entry.first - entry.arrived, 0.0), max(entry.last - entry.first, 0.0)

    @property
    def since_first_s(self) -> float:
        """Seconds since the first token; 0 before it."""
        return time.monotonic() - self._first if self._first else 0.0

    async def _wait_for_role(self, service: Service) -> None:
        """While the role changes; a request that came for the one before it is refused."""
        if service.switching.locked():
            async with service.switching:
                pass
        computes = service.config.role == "prefill"
        if self._call.role is not None and computes != (self._call.role == "prefill"):
            message = f"the server has become a {service.config.role} server meanwhile"
            raise Refusal(503, message, code="role_changed", retry_after_s=1)

    async def __aenter__(self) -> Self:
        service, config = self._service, self._service.config
        if any(job.request.pictures for job in self._submitted):
            # First: nothing may come between the checks below and the submission.
            await asyncio.to_thread(service.serving.encode, self._submitted)
        if (reason := service.serving.dead()) is not None:
            raise Refusal(
                503, f"the engine is not available: {reason}", code="engine_dead", retry_after_s=10
            )
        service.accounts.check_budget(self._call.holder)
        if service.asleep or service.waking.locked():  # or falls asleep at this moment
            await service.wake()
        await self._wait_for_role(service)
        self._ticket = service.admission.admit(self._call.holder, len(self.jobs))
        try:
            self._entry = self._begin()
            service.open.add(self)
            service.serving.submit(self._submitted)
            loop = asyncio.get_running_loop()
            self._watching = loop.create_task(self._watch())
            self._timers = [
                loop.call_later(config.first_token_deadline, self._miss_deadline),
                loop.call_later(config.request_timeout, self.abort),
            ]
        except BaseException as problem:  # whatever it is, the ticket goes back
            self._release()
            if (entry := self._call.entry) is not None:
                entry.close("error", time.monotonic())
            if isinstance(problem, CairnError):  # the engine ended after `dead` was asked
                raise Refusal(503, str(problem), code="engine_dead", retry_after_s=10) from None
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(self._status(error))

    async def finish(self) -> None:
        """Until all answers have ended. Raises Gone when the client has left, Refusal when the engine failed."""
        if self._call.progress is not None and len(self.jobs) == 1 and can_move(self.jobs[0]):
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(TOLD_EVERY_S, self._begin_to_tell))
        try:
            while not self.finished:
                await self._next()
        finally:
            if self._telling is not None:
                self._telling.cancel()
                await asyncio.wait([self._telling])  # in the middle of a write

    async def stream(self, writer: Writer, media_type: bytes = SSE) -> None:
        """Stream events until all answers end. An error before the first event is raised; a later one is an event,
        because the status has been sent."""
        events = self._call.event_stream(media_type)
        write = writer.write
        marked = self._call.routed and len(self.jobs) == 1
        marks, end = (TokenMarks(), END) if marked else (None, b"")
        if self._call.continued:  # the client has these, and the writer has to know them
            for job in self.jobs:
                write(job.answer.take())

        def written(deltas: Sequence[CompletionOutput]) -> bytes:
            body = write(deltas[0]) if len(deltas) == 1 else b"".join(map(write, deltas))
            return body if marks is None else marks.behind(body, deltas)

        def push(deltas: Sequence[CompletionOutput]) -> bool:
            return events.write_now(written(deltas))

        try:
            while not self.finished:
                if body := written(await self._next()):
                    await events.write(body)
                if events.begun:
                    await self._forward(push)
                    await events.flush()
            await events.write(writer.last() + end, last=True)
        except Gone:
            raise
        except Exception as error:
            if not events.begun:
                raise
            refusal = self._refusal_of(error)
            moves = marked and refusal.status == 503  # the router goes on elsewhere
            await events.flush()
            await events.write(b"" if moves else writer.refused(refusal) + end, last=True)

    def abort(self) -> None:
        """End the answers where they are; the reader gets what there is."""
        self._service.serving.abort(self.jobs)

    # -- inside ----------------------------------------------------------------------------------

    async def _next(self) -> list[CompletionOutput]:
        """Wait for new deltas, each of one answer."""
        self._entry.hand_over(time.monotonic())
        deltas = await self._reader.next()
        self._note_all(deltas)
        return deltas

    async def _forward(self, push: Push) -> None:
        """Hand what is new to `push` without waking this task, until it returns False or all have ended."""
        entry = self._entry

        def noted(deltas: list[CompletionOutput]) -> bool:
            self._note_all(deltas)
            more = push(deltas) and self._left > 0
            entry.hand_over(time.monotonic())
            return more

        if not self.finished:
            await self._reader.forward(noted)

    def _begin_to_tell(self) -> None:
        if not self.finished:
            self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        """The router learns the tokens so far, so that another server could go on with them."""
        answer, progress = self.jobs[0].answer, self._call.progress
        sent = len(self._call.continued)
        assert progress is not None
        while True:
            if tokens := answer.tokens_from(sent):
                sent += len(tokens)
                await progress.tell(tokens)
            await asyncio.sleep(TOLD_EVERY_S)

    def _begin(self) -> Entry:
        call, book = self._call, self._service.book
        entry = call.entry = book.begin(
            call.id, call.scope["path"], call.arrived, self.jobs, call.holder
        )
        entry.parent, entry.streamed = call.traceparent, call.streams
        if call.wants_ledger:
            call.send = LedgerSend(call.send, self._view)
        return entry

    def _view(self) -> RequestView:
        """The ledger just before the last bytes leave."""
        self._note_digest()
        return self._service.book.view(self._entry, about_to=self._status(None))

    def _note_digest(self) -> None:
        tokens = [token for job in self.jobs for token in job.answer.whole.token_ids]
        self._entry.digest = digest_of(tokens)

    def _refusal_of(self, error: Exception) -> Refusal:
        """Error document for a stream that has begun."""
        if isinstance(error, Refusal):
            return error
        self._broken = True
        if isinstance(error, CairnError):
            return refusal_of(error)
        return bug_found(self._call.id)

    def _status(self, error: BaseException | None) -> str:
        """Final status label."""
        if self._broken:
            return "error"
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
            self._reader.fail(Gone())

    def _miss_deadline(self) -> None:
        """An engine that makes progress is busy with what came before: the deadline counts from its last step."""
        if self._first:
            return
        deadline, idle = self._service.config.first_token_deadline, self._service.idle_s()
        if idle < deadline:
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(deadline - idle, self._miss_deadline))
            return
        self.abort()
        message = (
            f"no token came, and the engine has taken no step for the deadline of {deadline:g} s"
        )
        self._reader.fail(Refusal(503, message, code="deadline", retry_after_s=deadline))

    def _failed(self, reason: str) -> Refusal:
        """Refusal for a failed engine, which may succeed later because the engine is restarted."""
        if self._service.serving.dead() is not None:
            return Refusal(503, reason, code="engine_dead", retry_after_s=10)
        if FOLLOWED in reason:  # it led to where nothing is allowed: the request's fault, not ours
            return Refusal(400, reason, code="grammar_dead_end")
        log.error("request %s failed: %s", self._call.id, reason)
        if reason.startswith(UNREADABLE):  # a bug of ours, which would happen again
            return Refusal(500, reason, code="detokenize_error")
        return Refusal(503, reason, code="engine_error", retry_after_s=1)

    def _note_all(self, deltas: list[CompletionOutput]) -> None:
        """Count, and tell the ticket what has begun."""
        entry, last_of = self._entry, self._last_of
        now = entry.last = entry.handing = time.monotonic()
        for delta in deltas:
            before = last_of.get(delta.index)
            last_of[delta.index] = now
            if before is None:
                self._counts.answer_began(delta.index, now)
                self._note_first(now)
            elif self._call.streams:
                self._service.gaps.add(now - before)
                entry.longest = max(entry.longest, now - before)
            if delta.finish_reason is not None:
                self._left -= 1
                self._counts.answer_ended(delta, now)
                if delta.finish_reason == "error":
                    raise self._failed(delta.error or "no reason was given")

    def _note_first(self, now: float) -> None:
        """An answer has begun."""
        if self._ticket is not None:
            self._ticket.first_token()
        if not self._first:
            self._first = self._entry.first = now
            self._counts.first_token(now)
            if self._call.streams and self._call.body:
                self._service.pulse.begun(self._call.body, self.jobs)

    def _close(self, status: str) -> None:
        try:
            self._keep_books(status)
        finally:
            self._release()

    def _keep_books(self, status: str) -> None:
        self._counts.closed()
        self._service.accounts.explain(self._entry, self.jobs)
        self._entry.close(status, time.monotonic())
        if self._call.wants_ledger:
            self._note_digest()
        if self._service.capture is not None:
            version = self._service.serving.engine.weights_version()
            self._service.capture.keep(self._call.id, self.jobs, version)
        if self._call.body:
            self._service.pulse.bind(self._call.body, self.jobs)

    def _release(self) -> None:
        """Give back what was taken: first the ticket, which no error may keep."""
        if self._ticket is not None:
            self._ticket.close()
        self._service.open.discard(self)
        for timer in self._timers:
            timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        self.abort()  # whatever is left
