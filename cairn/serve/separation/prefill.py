"""The side that computes prompts: one token of each, and its pages on offer until they were read.

    add(Ask) --engine, one token--> Handoff(offer, first token)        the answer goes on elsewhere
                |               '-> Ended: it is over with that token, or was refused
                '- in several chunks, and its reader is connected: on offer from the first one on (`streaming`)

`step` does whatever there is to do and returns; one thread owns a side. Another answers readers (`SenderThread`),
because a step may take as long as a lease. A page is free again when its reader is through, has died, or has not
come in time.
"""

import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from cairn.comm.transfer.choose_transport import make_transport
from cairn.comm.transfer.handover_messages import Offer
from cairn.comm.transfer.handshake import Side
from cairn.comm.transfer.lease import TERMS, Freed, Terms
from cairn.core.errors import CairnError, ConfigError, RequestError
from cairn.serve.engine.loop import Engine, Output
from cairn.serve.engine.request import Finish, Request
from cairn.serve.engine.request_checks import check_request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.token_logprobs import TokenLogprobs
from cairn.serve.separation.handover_blocks import HandoverBlocks
from cairn.serve.separation.memory import KVMemory
from cairn.serve.separation.sender_thread import SenderThread
from cairn.serve.separation.streaming import Stream, Streams


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request as it travels between processes. A grammar does not: such a request stays on one engine."""

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    eos_ids: list[int] = []
    reader: str = ""  # as `DecodeSide.expect` says: who reads pages while others are computed

    def request(self, params: SamplingParams | None = None) -> Request:
        return Request(
            self.id,
            self.prompt,
            params or self.params,
            priority=self.priority,
            salt=self.salt,
            eos_ids=self.eos_ids,
        )


class Handoff(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A prompt that is computed: its first token, and where its pages can be read."""

    ask: Ask
    first: int
    offer: Offer
    logprobs: TokenLogprobs | None = None
    cached: int = 0  # tokens of the prompt that were found in the prefix cache
    compute_s: float = 0.0  # from its admission to the first token


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Result of a request that ended during prefill."""

    id: str
    token: int | None
    finish: Finish
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None


class OnOffer(NamedTuple):
    id: str  # of the request
    held: str  # the name under which its pages are kept
    table: list[int]  # where they are read


class PrefillSide:
    def __init__(
        self,
        engine: Engine,
        *,
        transport: str = "shm",
        host: str = "127.0.0.1",
        staged: bool | None = None,
        terms: Terms = TERMS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host`: the address that the transport listens on, where it listens on one."""
        self.engine, self.blocks = engine, hold_pages(engine)
        self.transport = make_transport(transport, f"prefill-{uuid.uuid4().hex[:12]}", host=host)
        self.memory = KVMemory(engine, self.transport, staged)
        side = Side(engine=self.transport.name, rank=0, layout=self.memory.layout)
        self._sender = SenderThread(self.transport, side, terms, clock)
        self.address = self._sender.address
        self._asks: dict[str, Ask] = {}
        self._waiting: list[tuple[Ask, Output]] = []  # computed, and no room to offer them yet
        self._offers: dict[str, OnOffer] = {}  # by name
        self._streams = Streams(engine, self.memory, self._sender)
        self._count = 0

    @property
    def has_work(self) -> bool:
        """Return whether `step` has work. Offered blocks also need occasional steps; see `handover_blocks`."""
        return self.engine.has_work or bool(self._waiting)

    @property
    def holding(self) -> int:
        """Sequences that were not read yet."""
        return len(self._offers)

    def add(self, ask: Ask) -> None:
        """Queue a request, or raise a RequestError."""
        params = ask.params
        # The layout that readers have compared is of the weights of the start.
        if self.engine.version:
            raise RequestError(
                f"the weights here were replaced by version {self.engine.version}, and others do not go on with them",
                hint="compute it where it is decoded, or start this server again with the new weights",
            )
        check_request(ask.request(), self.engine.scheduler.limits)  # of all that it asks for
        self.memory.check_room(len(ask.prompt))
        one = msgspec.structs.replace(params, max_tokens=1, min_tokens=min(params.min_tokens, 1))
        self.engine.add(ask.request(one))
        self._asks[ask.id] = ask
        if params.max_tokens != 1:
            self.blocks.keep(ask.id)

    def abort(self, id: str) -> None:
        self.engine.abort(id)
        self._asks.pop(id, None)
        self._waiting = [one for one in self._waiting if one[0].id != id]
        self._withdraw(id)

    def step(self, wait_s: float = 0.0) -> list[Handoff | Ended]:
        """`wait_s`: how long to wait for word of readers if there is nothing to compute."""
        busy = self.has_work
        self._streams.before_step()
        outputs = self.engine.step() if self.engine.has_work else []
        self._free(self._sender.freed(0.0 if busy else wait_s))
        replies: list[Handoff | Ended] = []
        for output in outputs:
            ask = self._asks.pop(str(output.request.id), None)
            if ask is None:
                continue
            if not output.tokens or output.request.finish != "length" or ask.params.max_tokens == 1:
                replies.append(self._ended(output))
            elif (offer := self._streams.complete(ask.id, self.blocks.table(ask.id))) is not None:
                self.blocks.let_go(ask.id)  # the stream holds them, too
                replies.append(_handoff(ask, output, offer))
            else:
                self._waiting.append((ask, output))
        replies += self._offer_what_has_room()
        self._stream()
        return replies

    def close(self) -> None:
        self._sender.close()

    def _ended(self, output: Output) -> Ended:
        request = output.request
        self._withdraw(str(request.id))
        return Ended(
            id=str(request.id),
            token=output.tokens[0] if output.tokens else None,
            finish=request.finish or "error",
            stop_reason=request.stop_reason,
            error=request.error,
            logprobs=output.logprobs[0] if output.logprobs else None,
        )

    def _offer_what_has_room(self) -> list[Handoff | Ended]:
        replies: list[Handoff | Ended] = []
        while self._waiting:
            ask, output = self._waiting[0]
            pages = self.blocks.table(ask.id)
            table = self.memory.place(pages)
            if table is None:
                break
            del self._waiting[0]
            self.memory.copy_out(pages, table)
            replies.append(self._offer(ask, output, table))
        return replies

    def _offer(self, ask: Ask, output: Output, table: list[int]) -> Handoff:
        name = self._new_name()
        self._offers[name] = OnOffer(ask.id, ask.id, table)
        offer = self._sender.grant(name, table, self.memory.entries_of(len(ask.prompt)))
        return _handoff(ask, output, offer)

    def _stream(self) -> None:
        """Further chunks of what is on offer already, and prompts whose first chunks have been computed."""
        for request, tokens in self._streams.computed(self._asks):
            ask, stream = self._asks[str(request.id)], self._streams.of(request)
            streams = ask.reader and ask.params.max_tokens != 1
            if stream is None and streams and not self._waiting:  # those first, if room is short
                stream = self._begin_stream(ask, request)
            if stream is not None and not self._streams.publish(stream, request, tokens):
                self._free(self._sender.withdraw(stream.offer.request))

    def _begin_stream(self, ask: Ask, request: Request) -> Stream | None:
        table = self.memory.place(request.blocks)
        if table is None:
            return None
        name = self._new_name()
        offer = self._sender.begin(ask.reader, name, table, len(ask.prompt))
        if offer is None:
            self.memory.take_back(table)
            return None
        self._offers[name] = OnOffer(ask.id, name, table)
        return self._streams.begin(request, offer, self.blocks.lend(request, name))

    def _new_name(self) -> str:
        self._count += 1
        return f"{self.transport.name}/{self._count}"

    def _withdraw(self, id: str) -> None:
        """Withdraw the offers of a request. A running transfer may finish."""
        self._streams.end(id)
        for name in [name for name, one in self._offers.items() if one.id == id]:
            self._free(self._sender.withdraw(name))
        if all(one.held != id for one in self._offers.values()):
            self.blocks.let_go(id)

    def _free(self, freed: list[Freed]) -> None:
        for one in freed:
            offered = self._offers.pop(one.request)
            self.memory.take_back(offered.table)
            self.blocks.let_go(offered.held)
            self._streams.freed(offered.id, one.request)


def _handoff(ask: Ask, output: Output, offer: Offer) -> Handoff:
    ledger = output.request.ledger
    return Handoff(
        ask=ask,
        first=output.tokens[0],
        offer=offer,
        logprobs=output.logprobs[0] if output.logprobs else None,
        cached=output.request.cached,
        compute_s=ledger.first_token - ledger.scheduled,
    )


def hold_pages(engine: Engine) -> HandoverBlocks:
    """A block manager that can hold pages, in place of the engine's own, which must be unused; its prefixes stay."""
    scheduler = engine.scheduler
    if engine.has_work or scheduler.blocks.usage().used:
        raise CairnError("the engine is at work already", hint="separate an engine that is new")
    if isinstance(scheduler.blocks, HandoverBlocks):  # it had another role before
        return scheduler.blocks
    limits, caching = scheduler.limits, scheduler.blocks.prefix.enabled
    if limits.states:
        raise ConfigError(
            "layers of this model keep a state, which is not sent between servers",
            hint="serve it without a role: prefill and decode in one server",
        )
    blocks = HandoverBlocks(
        limits.pages, limits.page_size, prefix_caching=caching, groups=limits.groups
    )
    blocks.take_over(scheduler.blocks)
    scheduler.manage(blocks)
    return blocks
