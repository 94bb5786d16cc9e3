"""What all endpoints share: the engine, who is let in, what is counted, whether it is well; from start to drain.

    start -> exchange, exchange, ... | a tick every second: health, totals | drain -> stop

A request on its way is an `Exchange`. Belongs to the thread of the event loop.
"""

import asyncio
import time
from functools import partial

from cairn.core.metrics import Metrics
from cairn.models.tokenizer import Tokenizer
from cairn.serve.grammar import Grammars, grammars_for
from cairn.serve.http.endpoints.health import Progress
from cairn.serve.http.ledger.ledger_book import Book
from cairn.serve.http.ledger.ledger_engine import EngineLook
from cairn.serve.http.ledger.ledger_floor import Floors
from cairn.serve.http.ledger.ledger_otel import Traces, open_traces
from cairn.serve.http.ledger.ledger_reply import wants_header
from cairn.serve.http.protocol.protocol_answers import Health
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.admission import Admission, Rules
from cairn.serve.http.server.backend import Backend
from cairn.serve.http.server.counts import (
    EngineTotals,
    Gaps,
    count_parts,
    rendered,
    server_metrics,
    show_engine,
)
from cairn.serve.http.server.exchange import Exchange, MakeJobs
from cairn.serve.http.server.following import Bell, Following
from cairn.serve.http.server.keys import Keys
from cairn.serve.http.server.settings import ServerConfig
from cairn.serve.http.tools.call import Call

TICK_S = 1.0
LONG_TEXT = 8192  # characters; a longer one is rendered and tokenized beside the event loop


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
        self._here = False  # do news come in the event loop's own thread?
        self._ticking: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """In the event loop that will serve."""
        loop = asyncio.get_running_loop()
        self._bell = Bell(loop)
        self._here = self.backend.engine.deliver_in(loop)
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
        return self.progress.verdict(
            stats,
            bool(self.open),
            self.backend.dead(),
            self.backend.engine.restarting(),
            self.admission.draining,
        )

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

    def check_length(self, text: str, field: str) -> None:
        """Refuse a text that cannot fit into the context, without tokenizing megabytes of it first."""
        context, longest = self.backend.limits.context, self.tokenizer.longest_token
        if len(text) > context * longest:
            raise Refusal(
                400,
                f"{field} has {len(text)} characters; the context has room for {context} tokens, "
                f"and the longest token has {longest} characters",
                param=field,
                code="context_length_exceeded",
            )

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
    ) -> Exchange:
        """`ledger`: the body asks for it."""
        if self._bell is None:
            raise RuntimeError("the service has not been started")
        call.streams, call.wants_field = bool(stream), bool(ledger)
        call.wants_ledger = call.wants_field or wants_header(call.scope)
        return Exchange(self, call, make_jobs, Following(self._bell, self._here))
