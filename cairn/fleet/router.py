"""The router: one address in front of many servers. Every request goes where its answer begins soonest.

    Downstream --request--> keys, Ask --choose--> Worker --Upstream--> answer
                          |                     ^ down, busy, silent: the next best one; none: it waits
                          '-- KeyIndex <-- PulseClient: what each server has cached, and its load

    GET /health   /metrics   /cairn/fleet   /cairn/fleet/requests/{id}      are the router's own; all else is passed on

One event loop, no task on the way of a request. What a decision was based on is remembered for the last requests.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from cairn.core.shared_secret import secret_from
from cairn.fleet.aliases import Aliases, with_model
from cairn.fleet.config import FleetConfig, RouterConfig
from cairn.fleet.downstream import Downstream, error_body
from cairn.fleet.exchange import Exchange
from cairn.fleet.failing_servers import leave_stuck
from cairn.fleet.fair_queue import WaitingQueue
from cairn.fleet.hedge import Hedging
from cairn.fleet.index import KeyIndex
from cairn.fleet.late_binding import LATE, answers_beside
from cairn.fleet.listen import cannot_listen, drop_who_does_not_read
from cairn.fleet.membership import Membership
from cairn.fleet.placement import place, place_next, place_waiting
from cairn.fleet.quota import Limits, Quotas
from cairn.fleet.quota_file import KeptQuotas
from cairn.fleet.routing_policy import OUTPUT_TOKENS, POLICIES, Arrivals, Ask, best
from cairn.fleet.scaling_policy import ScaledModel
from cairn.fleet.stuck_servers import StuckServers
from cairn.fleet.upstream import Pool, Upstream
from cairn.fleet.views import Choice, Views
from cairn.fleet.wire import HttpRequest
from cairn.fleet.worker import Worker, candidates, eligible
from cairn.fleet.write_queue import WriteQueue
from cairn.serve.text_keys import PromptKeys, RequestFields, prompt_keys, read_fields
from cairn.serve.token_marks import ROUTER_SECRET

TICK_S = 0.25
NO_KEYS = PromptKeys([], [], [], 0)
NO_FIELDS = RequestFields()
LONGEST_ID = 128
OWN_METHODS = (b"GET", b"HEAD")  # with which the router's own paths are asked


class Router:
    def __init__(self, config: RouterConfig, urls: Sequence[str]) -> None:
        self.config = config
        self.policy = POLICIES[config.policy]
        self.workers: list[Worker] = []
        self._writes = WriteQueue()
        self.index, self.pool, self._arrivals = KeyIndex(), Pool(self._writes), Arrivals()
        self.open: set[Exchange] = set()
        self.secret = secret_from(os.environ, ROUTER_SECRET)  # proves to servers who continues
        self.starting = False  # models are still being loaded for the first time
        self.waiting = WaitingQueue[Exchange]()  # while no server can take them
        self.aliases, self.quotas = Aliases(), _quotas(config)
        # Models that the endpoint picker waits for.
        self.picking: dict[asyncio.Event, str | None] = {}
        self.views, self.stuck_servers, self._hedging = Views(self), StuckServers(), Hedging(self)
        self.scaled: list[ScaledModel] = []  # whose servers come and go
        self.draining = False
        self.default_model: str | None = None  # of requests that name none
        self.on_waiting: Callable[[], None] | None = None  # a request waits for a server
        self.placing = False  # those that wait are being sent
        self._numbers = itertools.count()
        self._prefix = f"{os.urandom(9).hex()}-".encode()  # of the ids that it gives itself
        self._tasks: set[asyncio.Task[None]] = set()
        self._membership = Membership(self)
        self._urls = list(urls)
        self._listening: asyncio.Server | None = None
        self._own: asyncio.Server | None = None  # of this process alone, where several share a port
        self.own_address = ""
        self.processes: list[str] = []  # own addresses of all of them

    # -- life ------------------------------------------------------------------------------------

    async def start(self, shared: bool = False) -> str:
        """Listen, and follow the servers; returns the address. `shared`: other processes listen there, too."""
        self._listening = await self._listen(self.config.port, shared)
        if shared:
            self._own = await self._listen(0, False)
            self.own_address = _address(self._own)
        self.use(self._urls)
        self.spawn(self._tick())
        return _address(self._listening)

    async def _listen(self, port: int, shared: bool) -> asyncio.Server:
        most, host = self.config.max_body_bytes, self.config.host
        try:
            listening = await asyncio.get_running_loop().create_server(
                lambda: Downstream(self.handle, most, self._writes),
                host,
                port,
                backlog=2048,
                reuse_port=shared or None,
            )
        except OSError as error:
            raise cannot_listen(host, port, error) from None
        drop_who_does_not_read(listening)
        return listening

    async def stop(self, grace_s: float = 30.0) -> None:
        """Take nothing new; requests under way have so long to end."""
        self.draining = True
        for listening in (self._listening, self._own):
            if listening is not None:
                listening.close()
        ends = time.monotonic() + grace_s
        while self.open and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        for task in self._tasks:
            task.cancel()
        self.pool.close()

    def configure(self, config: FleetConfig) -> None:
        """Everything of a file that can change while it runs; where it listens and which servers it follows cannot."""
        self.policy = POLICIES[config.router.policy]
        self.config = msgspec.structs.replace(
            config.router,
            host=self.config.host,
            port=self.config.port,
            stall_s=self.config.stall_s,
            quota_file=self.config.quota_file,
        )
        self.aliases = Aliases(config.aliases)
        self._membership.sources = {
            url: source for group in config.servers for url, source in group.block_sources.items()
        }
        own = {
            one.sha256: Limits(one.requests_per_day, one.tokens_per_day, one.at_once)
            for one in config.keys
        }
        self.quotas.change(config.router.limits, own)
        self.waiting.weigh({one.sha256: one.weight for one in config.keys})

    def use(self, urls: Sequence[str]) -> None:
        """These servers from now on. One that is not among them any more finishes what it has and gets nothing new."""
        self._membership.use(urls)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with the router."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.config.stuck_s:
                leave_stuck(self, time.monotonic())
            self.place_waiting()

    # -- a request -------------------------------------------------------------------------------

    def handle(self, downstream: Downstream, request: HttpRequest) -> None:
        head = request.head
        if head.method in OWN_METHODS and (own := self.views.answer(head.path)) is not None:
            downstream.send(*own)
            return
        if self.draining:
            downstream.send(503, *error_body(503, "the router is stopping", "draining"))
            return
        fields, number = _read(request.body), next(self._numbers)
        model = fields.model or self.default_model
        if self.aliases.targets:
            model = self._resolve_alias(request, fields, model, number)
        keys = prompt_keys(fields) if request.body else NO_KEYS
        now, client_id, computes = time.monotonic(), request.id, head.computes
        id = client_id if client_id and _is_id(client_id) else b"%b%x" % (self._prefix, number)
        streams = head.generates and bool(head.streams if fields.stream is None else fields.stream)
        ask = self.ask(number, keys, fields.wanted_tokens, now, computes, streams)
        downstream.pending = exchange = Exchange(
            self,
            downstream,
            request,
            id,
            ask,
            keys,
            model,
            fields,
            now,
            head.holder,
            computes,
            streams,
        )
        if self.quotas.limited and request.body and not self._admit(exchange):
            return
        if computes:
            self.waiting.arrived(head.holder)
        self.open.add(exchange)
        place(self, exchange, now)

    def _resolve_alias(
        self, request: HttpRequest, fields: RequestFields, model: str | None, number: int
    ) -> str | None:
        """The model that this request gets, which is written into its body."""
        target = self.aliases.target(model, number, bytes(fields.user))
        if not target:
            return model
        if fields is not NO_FIELDS:
            fields.model, request.body = target, with_model(request.body, target)
        return target

    def _admit(self, exchange: Exchange) -> bool:
        """Within the quota of its key? Otherwise it is answered here."""
        reserved = (
            exchange.ask.prompt_tokens + exchange.most_answer_tokens if exchange.computes else 0
        )
        refused = self.quotas.admit(exchange.holder, reserved, time.time())
        if refused is None:
            exchange.admitted, exchange.reserved = True, reserved
            return True
        self.views.refused[refused.code] += 1
        lines, body = error_body(429, refused.message, refused.code)
        again = b"retry-after: %d\r\n" % refused.retry_after_s
        exchange.downstream.send(429, lines.replace(b"retry-after: 1\r\n", again), body)
        return False

    def eligible(
        self, now: float, model: str | None, tried: Collection[int] = (), computes: bool = True
    ) -> list[Worker]:
        """Servers that may get it; a full one only what it need not compute.

        One that sleeps wakes up for it, unless its host has to make room first.
        """
        workers = eligible(self.workers, now, model, with_room=computes)
        if tried:
            workers = [one for one in workers if one.number not in tried]
        if workers:
            return workers
        untried = [one for one in self.workers if one.number not in tried and not one.managed]
        return eligible(untried, now, model, "asleep")

    def promised_s(self, model: str | None) -> float:
        """Within which first tokens are promised: of models whose servers come and go with it."""
        return next((one.ttft_s for one in self.scaled if one.serves(model)), inf)

    def next_number(self) -> int:
        return next(self._numbers)

    def ask(
        self,
        number: int,
        keys: PromptKeys,
        wanted: int | None,
        now: float,
        computes: bool = True,
        streams: bool = False,
    ) -> Ask:
        """Create the routing input of a request. With several processes each sees its share of the arrivals."""
        if not computes:
            return Ask(number, keys.length, 0)
        share = (len(self.processes) or 1) / (len(self.workers) or 1)
        output = wanted or OUTPUT_TOKENS
        waited_s = 0.0 if streams and self.config.policy in LATE else inf
        return self._arrivals.ask(
            number, keys.length, output if output > 1 else 1, now, share, waited_s
        )

    def choose(
        self, ask: Ask, keys: PromptKeys, workers: list[Worker], now: float
    ) -> tuple[Choice, int]:
        """The best of these servers, and the tokens of the prompt that it has to compute."""
        cached = self.index.match(keys.keys, keys.tokens, now) if keys.keys else {}
        beside = answers_beside(ask, workers) if ask.waited_s < inf else []
        seen = candidates(workers, cached, beside)
        at, costs = best(self.policy, ask, seen)
        new = ask.prompt_tokens - seen[at].cached_tokens
        choice = Choice(self.config.policy, workers[at], at, workers, seen, costs)
        return choice, new if new > 1 else 1

    def note_sent(self, ask: Ask, keys: PromptKeys, choice: Choice, now: float) -> None:
        """A request goes where it was decided: its work, and what will be cached there."""
        if ask.output_tokens:
            self._arrivals.sent(ask, choice.candidates[choice.position])
        if keys.keys:
            self.index.expect(choice.chosen.number, keys.keys, now)

    def send(self, exchange: Exchange, choice: Choice, new: int, now: float) -> None:
        chosen = choice.chosen
        self.note_sent(exchange.ask, exchange.keys, choice, now)
        exchange.assign(chosen, new)
        if self.scaled:
            self.meter_once(exchange, new * chosen.token_s, now)
        if exchange.computes:
            self.waiting.charge(exchange.holder, new)
        self.views.note(exchange, choice)
        if self.config.hedge_s:
            others = len(choice.workers) > 1
            self._hedging.sent(exchange, self.config.hedge_s if others else 0.0)
        if self._membership.blocks:
            self._membership.learn_blocks(exchange, chosen)
        if (upstream := self.pool.take(chosen)) is not None:
            exchange.send(upstream)
        else:
            attempt = exchange.attempts
            self.connect(chosen, lambda new, reason: exchange.connected(new, reason, attempt))

    def connect(self, worker: Worker, ready: Callable[[Upstream | None, str], None]) -> None:
        self.spawn(self.pool.connect(worker, ready))

    def can_retry(self, exchange: Exchange, worker: Worker) -> bool:
        """Is there another server, when this one has no room?"""
        now, tried = time.monotonic(), {*exchange.tried, worker.number}
        workers = eligible(self.workers, now, exchange.model)
        return any(one.number not in tried for one in workers)

    def lost(self, worker: Worker, reason: str) -> None:
        worker.failed(time.monotonic())

    def done(self, exchange: Exchange) -> None:
        self.open.discard(exchange)
        output = exchange.charged_tokens
        if output:
            self.waiting.charge(exchange.holder, 0, output)
        if exchange.admitted:
            used = exchange.ask.prompt_tokens + output if output is not None else 0
            self.quotas.settle(exchange.holder, exchange.reserved, used, time.time())
        if self.waiting.models:
            self.waiting.remove(exchange)
            place_next(self, time.monotonic())
        if exchange.record is not None:
            exchange.record.ended = True

    def meter(
        self, model: str | None, now: float, prefill_s: float, came_s: float | None = None
    ) -> None:
        """A request has come, with so much to compute."""
        for one in self.scaled:
            if one.serves(model):
                one.meter.arrived(now, prefill_s, came_s)

    def meter_once(self, exchange: Exchange, prefill_s: float, now: float) -> None:
        """Its work counts when it comes, or when it is sent again."""
        if not exchange.metered or exchange.attempts > 1:
            exchange.metered = True
            self.meter(exchange.model, now, prefill_s, exchange.waits_since_s)

    def place_waiting(self) -> None:
        """Something has changed: those that wait, and those that have waited for too long."""
        for waiting in self.picking:
            waiting.set()
        place_waiting(self, time.monotonic())


def _quotas(config: RouterConfig) -> Quotas:
    if not config.quota_file:
        return Quotas(config.limits)
    return KeptQuotas(config.limits, Path(config.quota_file))


def _address(listening: asyncio.Server) -> str:
    host, port = listening.sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _read(body: bytes) -> RequestFields:
    """A body that is no JSON of ours is the server's to refuse."""
    if not body:
        return NO_FIELDS
    try:
        return read_fields(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return NO_FIELDS


def _is_id(text: bytes) -> bool:
    """Would a server take it?"""
    plain = text.replace(b"-", b"").replace(b"_", b"")
    return 0 < len(text) <= LONGEST_ID and plain.isalnum()
