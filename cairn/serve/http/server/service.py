"""Shared state of all endpoints: model, admission, metrics, timings and health, from start to drain.

    start -> requests ... | a tick every second: health, totals | drain -> stop

A request on its way is an `Exchange`, which this file does not know. Belongs to the thread of the event loop.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Protocol

from cairn.core.errors import CairnError
from cairn.core.metrics import Metrics
from cairn.core.shared_secret import secret_from
from cairn.hw.energy import open_energy
from cairn.models.tokenizer import Tokenizer
from cairn.serve.adapter_folder import AdapterFolder, read_module
from cairn.serve.answer_reader import LoopWaker
from cairn.serve.capture import Capture
from cairn.serve.http.batches.runner import BatchRunner
from cairn.serve.http.ledger.accounts import Accounts
from cairn.serve.http.ledger.engine_view import EngineLook
from cairn.serve.http.ledger.floor import Floors
from cairn.serve.http.ledger.otel import Traces, open_traces
from cairn.serve.http.ledger.recent_ledgers import RecentLedgers
from cairn.serve.http.protocol.answers import Health
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.admission import Admission, Rules
from cairn.serve.http.server.counts import (
    EngineTotals,
    Gaps,
    count_parts,
    server_metrics,
    show_engine,
)
from cairn.serve.http.server.followers import Followers
from cairn.serve.http.server.health import Progress
from cairn.serve.http.server.keys import Keys
from cairn.serve.http.server.kv_events import KvPublisher
from cairn.serve.http.server.loop_lag import LoopLag
from cairn.serve.http.server.response_store import ResponseStore
from cairn.serve.http.server.settings import ServerConfig
from cairn.serve.http.server.vllm_metrics import vllm_text
from cairn.serve.serving import ModelNotServed, ServedModel, Serving
from cairn.serve.token_marks import ROUTER_SECRET

log = logging.getLogger("cairn")
TICK_S = 1.0
DEATH_S = 5.0  # for which a server whose engine is gone says so, before it ends
LONG_TEXT = 8192  # characters; a longer one is rendered and tokenized beside the event loop


class OpenRequest(Protocol):
    """A request that was admitted and has not ended."""

    def abort(self) -> None: ...


class Service:
    def __init__(self, config: ServerConfig, serving: Serving, keys: Keys = Keys()) -> None:  # noqa: B008
        self.config, self.serving, self.keys = config, serving, keys
        self.model = serving.model(None).name
        self.created = int(time.time())
        self._closing = ExitStack()
        self.admission = Admission(_rules(config, serving))
        self.progress = Progress(config.progress_timeout)
        self.lag = LoopLag()
        # What is counted and kept of requests.
        self.gaps = Gaps(self.model)
        self.metrics: Metrics = server_metrics(self.model, self.gaps)
        self._totals = EngineTotals(self.model)
        self.book = RecentLedgers(Floors(serving.opened.spec, serving.facts))
        self.book.on_settled.append(partial(count_parts, self.metrics, self.model))
        self._traces: Traces | None = None
        if config.otel_endpoint is not None:
            self.send_traces(open_traces(config.otel_endpoint, self.model))
        self.accounts = self._open_accounts()
        self.book.on_settled.append(self.accounts.settle)
        self.look = EngineLook(serving, self.book, self.gaps, self.admission, self.health)
        self.responses = ResponseStore(config.store_responses)
        self.capture: Capture | None = None
        if config.capture is not None:
            self.capture = Capture(config.capture, config.engine(), serving.facts.device)
        # What is served beside the model, and who follows it.
        self.adapters = self._load_adapters()
        self.batches: BatchRunner | None = None  # where there is a folder for them
        self.router_secret = secret_from(os.environ, ROUTER_SECRET)
        self.pulse = self._open_pulse()
        self.prefill_urls = tuple(config.prefill_urls)  # servers that may be asked for prompts
        # Requests on their way, and what holds them up.
        self.open: set[OpenRequest] = set()
        self.paused = False  # by an administrator: requests wait
        self.waking = asyncio.Lock()
        self.switching = asyncio.Lock()  # while the role changes, requests wait
        self._waker: LoopWaker | None = None
        self._same_thread = False  # do updates come in the event loop's own thread?
        self._ticking: list[asyncio.Task[None]] = []
        self._scan: asyncio.Task[None] | None = None  # of the folder of adapters
        self.died: str | None = None  # why the engine takes no requests any more
        self.on_death: Callable[[], None] = lambda: None  # called `DEATH_S` after that
        self._stopping: asyncio.Task[None] | None = None

    def _open_accounts(self) -> Accounts:
        """Energy is read where the devices are GPUs; texts are kept only where the settings ask for them."""
        config, serving, uuids = self.config, self.serving, self.serving.facts.uuids
        return Accounts(
            serving.limits.page_size,
            config.key_tokens_per_day,
            serving.tokenizer.decode if config.ledger_text and serving.has_tokenizer else None,
            open_energy(uuids, self._closing) if uuids else None,
        )

    def _load_adapters(self) -> AdapterFolder | None:
        """Load the adapters of the settings and of their folder, which is rescanned while the server runs."""
        for module in self.config.lora_modules:
            self.serving.load_adapter(*read_module(module))
        if self.config.adapters is None:
            return None
        folder = AdapterFolder(self.config.adapters, self.serving)
        folder.scan()
        return folder

    def _open_pulse(self) -> Followers:
        config = self.config
        pulse = Followers(self.serving, lambda: self.health().status, config.role)
        if config.kv_events is not None:
            publisher = KvPublisher(
                self.serving.limits.page_size,
                config.kv_events,
                config.kv_events_replay,
                config.kv_events_topic,
            )
            self._closing.callback(publisher.close)
            pulse.publisher = publisher
        return pulse

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start in the event loop that will serve."""
        loop = asyncio.get_running_loop()
        self._waker = LoopWaker(loop)
        self._same_thread = self.serving.engine.deliver_in(loop)
        self._ticking = [
            asyncio.create_task(self._tick()),
            asyncio.create_task(self.lag.watch()),
        ]
        if self.pulse.publisher is not None:
            self._ticking.append(asyncio.create_task(self.pulse.note_pages()))
        if self.serving.has_tokenizer:
            self.serving.grammars.warm_up()  # in its own thread
        if self.batches is not None:
            self.batches.start()

    async def stop(self) -> None:
        """Everything has been answered, or has had its time."""
        for task in (*self._ticking, *([self._scan] if self._scan is not None else ())):
            task.cancel()
        if self.batches is not None:
            await self.batches.stop()
        self._closing.close()
        await asyncio.to_thread(self.serving.close)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        if self.capture is not None:
            await asyncio.to_thread(self.capture.close)

    def at_end(self, call: Callable[[], None]) -> None:
        """`call` is made when the service stops, once no batch runs any more."""
        self._closing.callback(call)

    def take_role(self, config: ServerConfig) -> None:
        """The engine has changed its role; `config` differs in nothing else."""
        self.config = config
        self.pulse.role = config.role

    def send_traces(self, traces: Traces) -> None:
        """Every request that ends from now on becomes a span."""
        self._traces = traces
        self.book.on_settled.append(traces.tell)

    def drain(self) -> None:
        """Admit no requests any more; open ones have the grace period to finish, and then end with what they have."""
        if not self.admission.draining:
            self.admission.draining = True
            if self.open:
                grace = f"{self.config.drain_timeout:g} s to finish (drain_timeout)"
                again = "another Ctrl-C ends them at once"
                log.warning("%d open requests have %s; %s", len(self.open), grace, again)
            loop = asyncio.get_running_loop()
            loop.call_later(self.config.drain_timeout, self.end_all)
            if self.batches is not None:  # the next server does the rest of them
                self._stopping = loop.create_task(self.batches.stop())

    def end_all(self) -> None:
        for request in list(self.open):
            request.abort()

    async def _tick(self) -> None:
        problem = ""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self._look_after()
            except Exception as error:  # health and what is cached are looked at again all the same
                if (text := repr(error)) != problem:
                    log.exception("what is done every second has failed")
                problem = text

    async def _look_after(self) -> None:
        """Every second."""
        await self._look_at_engine()
        self.pulse.collect()
        stats = self.serving.engine.stats()
        self.look.sample(stats)
        self._totals.count(self.metrics, stats)
        self.accounts.tick(stats, self.book.running())
        scan = self._scan
        if self.adapters is not None and not self.asleep and (scan is None or scan.done()):
            # Beside the tick: an engine that hangs takes no adapter, and has to be looked at all the same.
            self._scan = asyncio.create_task(asyncio.to_thread(self.adapters.scan))
            if scan is not None:
                scan.result()

    async def _look_at_engine(self) -> None:
        """An engine that hangs is given up, and a server whose engine is gone ends: a supervisor starts it again."""
        health = self.health()
        if health.status == "stalled" and self.progress.still_s > self.config.hang_timeout:
            await asyncio.to_thread(self.serving.engine.give_up, health.reason or "")
        # SIGTERM may reach the engine's processes as well, which then end before the server.
        if health.status == "dead" and self.died is None and not self.admission.draining:
            self.died = health.reason
            asyncio.get_running_loop().call_later(DEATH_S, self.on_death)

    # -- what endpoints ask ----------------------------------------------------------------------

    @property
    def asleep(self) -> bool:
        """The memory was given back; the next request wakes it."""
        return self.serving.asleep

    async def wake(self) -> None:
        """Wake a sleeping engine before a request; concurrent requests wait for the same wake-up."""
        async with self.waking:
            if not self.asleep:
                return
            try:
                await asyncio.to_thread(self.serving.wake)
            except CairnError as error:
                message = f"{self.model} sleeps and cannot wake up: {error}"
                raise Refusal(503, message, code="still_asleep", retry_after_s=5) from None

    def has_free_row(self) -> bool:
        """Is there a row of the engine that no request uses or waits for?"""
        return self.admission.inside < self.serving.limits.rows

    def idle_s(self) -> float:
        """Seconds that the engine has had work and taken no step."""
        return self.progress.look(self.serving.engine.stats().steps, busy=True)

    def health(self) -> Health:
        stats = self.serving.engine.stats()
        # Requests that were refused meanwhile are still in an engine that hangs, and keep it from looking idle.
        busy = bool(self.open or stats.running or stats.waiting)
        return self.progress.verdict(
            stats,
            busy and not self.paused,
            self.serving.dead(),
            self.serving.engine.restarting(),
            self.admission.draining,
            self.asleep,
        )

    def metrics_text(self) -> str:
        stats = self.serving.engine.stats()
        facts = self.serving.facts
        weights_bytes = facts.weights_bytes * facts.ranks
        show_engine(self.metrics, self.model, stats, self.admission.inside, weights_bytes)
        self._totals.count(self.metrics, stats)
        self.accounts.count(self.metrics, self.model)
        self.metrics.set("cairn_event_loop_lag_seconds", self.lag.worst_s, model=self.model)
        return self.metrics.render() + vllm_text(self.model, stats, self.serving.limits)

    def check_model(self, name: str | None) -> str:
        """The name to answer with."""
        return self.served(name).name

    def served(self, name: str | None) -> ServedModel:
        """The model or adapter with this name. A server of a single model accepts any name."""
        if not self._several and name not in self.serving.models:
            name = None
        return self.named(name)

    def named(self, name: str | None) -> ServedModel:
        """The model or adapter with exactly this name."""
        try:
            return self.serving.model(name)
        except ModelNotServed as error:
            raise Refusal(404, error.message, param="model", code="model_not_found") from None

    @property
    def _several(self) -> bool:
        """Return whether names select models, now or recently: an unknown name may be a mistake, or of one that is
        gone."""
        config = self.config
        may_come = config.adapters is not None or config.admin_endpoints
        return may_come or self.serving.had_adapters

    @property
    def tokenizer(self) -> Tokenizer:
        if not self.serving.has_tokenizer:
            message = f"{self.model} has no tokenizer, so it reads and writes token ids only"
            raise Refusal(400, message, code="no_tokenizer")
        return self.serving.tokenizer

    def check_length(self, text: str, field: str) -> None:
        """Refuse a text that cannot fit into the context, without tokenizing megabytes of it first."""
        context, longest = self.serving.limits.context, self.tokenizer.longest_token
        if len(text) > context * longest:
            raise Refusal(
                400,
                f"{field} has {len(text)} characters; the context has room for {context} tokens, "
                f"and the longest token has {longest} characters",
                param=field,
                code="context_length_exceeded",
                prompt_tokens=-(-len(text) // longest),  # at least
                context=context,
            )

    async def encode(self, text: str, special: bool = True) -> list[int]:
        if len(text) <= LONG_TEXT:
            return self.tokenizer.encode(text, special)
        return await asyncio.to_thread(self.tokenizer.encode, text, special)

    def most_tokens(self, limit: int | None, prompt_tokens: int) -> int | None:
        """Maximum tokens of an answer: the requested number, limited by the remaining context and the
        server's own limit. None: what the context leaves."""
        largest = self.config.max_request_tokens
        room = max(1, self.serving.limits.context - prompt_tokens)
        if limit is None and largest is None:
            return None
        return min(limit or room, room, largest or room)

    def reserved(self, answer: int | None) -> int:
        """Tokens that a prompt which is cut leaves for the answer: so many, or half of the context where an agent's
        limit is all of it or more."""
        context = self.serving.limits.context
        return context // 2 if (answer or 1) >= context else answer or 1

    def most_prompt_tokens(self, limit: int | None, answer: int | None) -> int | None:
        """Maximum prompt tokens to truncate to; None to reject long prompts. `answer` is the reserved answer length."""
        if limit is None:
            return None
        context = self.serving.limits.context
        if limit != -1 and not 1 <= limit < context:
            most = context - 1
            message = f"truncate_prompt_tokens is {limit}; it has to be -1 or between 1 and {most}"
            raise Refusal(400, message, param="truncate_prompt_tokens")
        return max(context - self.reserved(answer), 1) if limit == -1 else limit

    @property
    def reading(self) -> tuple[LoopWaker, bool]:
        """Waker for `AnswerReader`s of this event loop."""
        if self._waker is None:
            raise RuntimeError("the service has not been started")
        return self._waker, self._same_thread


def _rules(config: ServerConfig, serving: Serving) -> Rules:
    return Rules(
        rows=serving.limits.rows,
        waiting=config.max_waiting,
        first_token_s=config.first_token_deadline,
        key_per_minute=config.key_requests_per_minute,
        key_at_once=config.key_concurrent_requests,
    )
