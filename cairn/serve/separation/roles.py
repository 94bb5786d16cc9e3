"""An engine with a role: one that computes prompts for others, or one that goes on with prompts that others computed.

    prefill   add --PrefillSide--> one token, pages on offer --> the request ends, its Handoff waits for the endpoint
    decode    add --PrefillClient--> Handoff --DecodeSide--> pages arrive --> decodes
                   |   '- of a prompt in several chunks the first pages arrive while the others are computed
                   '- too short, constrained, with an adapter or pictures, or no answer: computed by this engine

    both      add --> the engine itself

All have the interface of `Engine`, so that `EngineThread` and a worker process drive them like any other. An idle
engine can change its role (`RoleEngine.switch`), and its prefix cache stays. One thread owns them.
"""

import os
import queue
from typing import Any, cast

import msgspec

from cairn.core.errors import ConfigError, RequestError
from cairn.serve.config import RoleConfig
from cairn.serve.engine.loop import Engine, Output
from cairn.serve.engine.request import Finish, Request, RequestId
from cairn.serve.engine.token_logprobs import TokenLogprobs
from cairn.serve.separation.decode import LOOK_S, Arrival, DecodeSide
from cairn.serve.separation.prefill import Ask, Ended, Handoff, PrefillSide
from cairn.serve.separation.prefill_client import PrefillClient, Reply
from cairn.serve.separation.remote_prefill_policy import Pending, RemoteCosts, pays_elsewhere

HELD_S = 0.005  # between two looks at pages that may have been read
REPLY_S = 0.02  # the longest wait for a prefill server when there is nothing to decode


def with_role(engine: Engine, config: RoleConfig) -> Engine:
    """The engine in this role, whatever it was in before; a RequestError: it is at work."""
    role = engine if isinstance(engine, RoleEngine) else RoleEngine(engine)
    role.switch(config)
    return cast(Engine, role)


class RoleEngine:
    """An engine that is what its present role makes of it."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = engine
        self._now: Engine | PrefillEngine | DecodeEngine = engine
        self._role = "both"
        self._remote = self._fallbacks = 0  # prompts of roles before the present one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)

    @property
    def remote_prefills(self) -> int:
        """Since the start, whatever the roles: totals that become less would look like another engine's."""
        return self._remote + getattr(self._now, "remote_prefills", 0)

    @property
    def prefill_fallbacks(self) -> int:
        return self._fallbacks + getattr(self._now, "prefill_fallbacks", 0)

    def _become(self, now: "Engine | PrefillEngine | DecodeEngine") -> None:
        self._remote, self._fallbacks = self.remote_prefills, self.prefill_fallbacks
        self._now = now

    def check_sleep(self, level: int = 1) -> None:
        if self._role != "both":
            raise ConfigError(
                f"an engine of the role {self._role} has pages that others read, and does not sleep",
                hint="change its role to both",
            )
        self._engine.check_sleep(level)

    def sleep(self, level: int = 1) -> None:
        """Put the engine to sleep; one that is back in both roles also releases its transfer memory."""
        self.check_sleep(level)
        before = self._now
        if isinstance(before, Engine):
            before.sleep(level)
            return
        if before.has_work:
            raise RequestError("requests are under way", hint="wait for their end")
        self._engine.sleep(level)
        self._become(self._engine)
        before.close()

    def switch(self, config: RoleConfig) -> None:
        """Requests that come from now on are taken in this role; a RequestError: the one before is at work."""
        before = self._now
        if isinstance(before, DecodeEngine) and config.role != "prefill":
            before.ask(client_of(config), config)
            self._role = config.role
            return
        used = self._engine.scheduler.blocks.usage().used
        if before.has_work or used:
            raise RequestError(
                f"requests are under way, or others read their pages: {used} pages are in use",
                hint="wait for their end",
            )
        where = {"transport": config.transport, "host": config.host}
        if config.role == "prefill":
            self._become(PrefillEngine(PrefillSide(self._engine, **where)))
        else:
            side = DecodeSide(self._engine, **where)
            self._become(DecodeEngine(side, client_of(config), config))
        self._role = config.role
        if not isinstance(before, Engine):  # behind the other, which has taken its pages over
            before.close()


def client_of(config: RoleConfig) -> PrefillClient | None:
    """Prefill client of a decode server; None for other roles."""
    if config.role != "decode":
        return None
    key = os.environ.get("CAIRN_PREFILL_KEY")
    return PrefillClient(config.prefill_urls, config.prefill_timeout_s, key)


class PrefillEngine:
    """Every request ends after one token; what is needed to go on elsewhere is its `handoff`."""

    def __init__(self, side: PrefillSide) -> None:
        self.side = side
        self._requests: dict[str, Request] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.side.engine, name)  # whatever is not said here is the engine's own

    def close(self) -> None:
        self.side.close()

    @property
    def has_work(self) -> bool:
        return self.side.has_work or self.side.holding > 0

    def add(self, request: Request) -> None:
        ask = ask_of(request)
        self.side.add(ask)
        self._requests[ask.id] = request

    def abort(
        self, id: RequestId, reason: Finish = "abort", stop_reason: int | str | None = None
    ) -> Request | None:
        request = self._requests.pop(str(id), None)
        if request is not None:
            self.side.abort(str(id))
            request.finish, request.stop_reason = reason, stop_reason
        return request

    def pause(self, keep: bool = True) -> list[Request]:
        """Pause the engine; aborted requests are also removed from this side."""
        self.side.engine.pause()
        aborted = [] if keep else [self.abort(id) for id in list(self._requests)]
        return [request for request in aborted if request is not None]

    def step(self) -> list[Output]:
        outputs = []
        for reply in self.side.step(HELD_S):
            handoff = isinstance(reply, Handoff)
            request = self._requests.pop(reply.ask.id if handoff else reply.id)
            request.handoff = msgspec.msgpack.encode(reply)
            if handoff:
                request.outputs.append(reply.first)
                request.finish, request.cached = "length", reply.cached
                outputs.append(output_of(request, reply.first, True))
            else:
                outputs.append(ended_output(request, reply))
        return outputs


class DecodeEngine:
    """Asks another server for the pages of long prompts, and computes them itself where that fails."""

    def __init__(self, side: DecodeSide, client: PrefillClient | None, config: RoleConfig) -> None:
        """`client`: with None no other server is asked."""
        self.side, self._client, self._config = side, client, config
        self.costs = RemoteCosts()
        side.on_arrival = self._note_arrival
        self._asked_at: dict[
            str, tuple[float, int]
        ] = {}  # and the tokens that were asked for before
        self.remote_prefills = 0  # prompts that came from elsewhere
        self._unanswered = 0  # prompts that no prefill server computed
        self._asked: dict[str, Request] = {}
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.side.engine, name)  # whatever is not said here is the engine's own

    def ask(self, client: PrefillClient | None, config: RoleConfig) -> None:
        """Prompts that come from now on are asked for there; those that were asked for elsewhere still come."""
        before, self._client, self._config = self._client, client, config
        if before is not None:
            before.close(finish=True)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self.side.close()

    @property
    def has_work(self) -> bool:
        return self.side.has_work or bool(self._asked) or not self._replies.empty()

    @property
    def prefill_fallbacks(self) -> int:
        """Prompts that were asked for elsewhere, and had to be computed here."""
        return self._unanswered + self.side.not_arrived

    def add(self, request: Request) -> None:
        client, now = self._client, self.clock()
        if client is None or not self._is_remote(request, now):
            self.side.engine.add(request)
            return
        ledger = request.ledger
        ledger.arrived = ledger.admitting = ledger.scheduled = now
        ask = msgspec.structs.replace(ask_of(request), reader=self.side.expect(request))
        self._asked_at[ask.id] = now, round(self._pending().tokens)
        self._asked[ask.id] = request
        client.ask(ask, self._replies.put)

    def abort(
        self, id: RequestId, reason: Finish = "abort", stop_reason: int | str | None = None
    ) -> Request | None:
        request = self._asked.pop(str(id), None)
        if request is None:
            return self.side.abort(id, reason, stop_reason)
        self.side.forget(id)
        request.finish, request.stop_reason = reason, stop_reason
        return request

    def pause(self, keep: bool = True) -> list[Request]:
        """Pause the engine; remote and in-transfer requests are also aborted."""
        self.side.engine.pause()
        remote = [request.id for request in self._asked.values()]
        aborted = [] if keep else [self.abort(id) for id in [*remote, *self.side.request_ids()]]
        return [request for request in aborted if request is not None]

    def step(self) -> list[Output]:
        outputs: list[Output] = []
        busy, expects = self.side.has_work, self.side.expects
        wait_s = 0.0 if busy else LOOK_S if expects else REPLY_S
        while True:
            try:
                reply = self._replies.get(wait_s > 0, wait_s)
            except queue.Empty:
                break
            wait_s = 0.0
            outputs += self._replied(reply)
        has_work = self.side.has_work or self.side.expects
        return outputs + (self.side.step() if has_work else [])

    def _is_remote(self, request: Request, now: float) -> bool:
        """A constraint does not travel, and what is asked of every prompt token is computed where it is read.

        Nor does an adapter, a picture, or the version of the weights: others may have been loaded here.
        """
        short = len(request.prompt) < self._config.prefill_min_tokens
        if short or request.constraint is not None or request.params.whole_prompt:
            return False
        if request.adapter or request.identity or request.pieces or self.side.engine.version:
            return False
        if self._config.prefill_when == "always":
            return True
        scheduler, bytes_of = self.side.engine.scheduler, self.side.memory.bytes_of
        return pays_elsewhere(scheduler, request, self.costs, bytes_of, now, self._pending())

    def _pending(self) -> Pending:
        """Pending work of each prefill server, assuming round robin."""
        remote, share = self._asked.values(), 1 / max(len(self._config.prefill_urls), 1)
        return Pending(len(remote) * share, sum(len(one.prompt) for one in remote) * share)

    def _replied(self, reply: Reply) -> list[Output]:
        request, result = self._asked.pop(reply.id, None), reply.found
        (began, behind), now = self._asked_at.pop(reply.id, (0.0, 0)), self.clock()
        if isinstance(result, Handoff):
            computed = len(result.ask.prompt) - result.cached
            self.costs.note_reply(computed, result.compute_s, now - began, now, behind)
        if request is None:  # it was aborted meanwhile
            if isinstance(result, Handoff):
                self.side.decline(result.offer)
            return []
        if not isinstance(result, Handoff):
            self.side.forget(reply.id)
        if isinstance(result, Ended) and result.finish in ("stop", "length"):
            self._began(request)
            return [ended_output(request, result)]
        if not isinstance(result, Handoff):
            self._unanswered += 1
            request.ledger.admitting = request.ledger.scheduled = 0.0
            self.side.engine.add(request)
            return []
        self.remote_prefills += 1
        self._began(request)
        self.side.add(result, request)
        return [output_of(request, result.first, False, result.logprobs)]

    def _note_arrival(self, arrival: Arrival) -> None:
        """Record the costs of a transfer. The rest of a stream counts only if no bandwidth is known."""
        seconds = arrival.moved_s
        if arrival.streamed:
            seconds = 0.0 if self.costs.bytes_per_s else max(seconds, LOOK_S)
        self.costs.note_pages(arrival.bytes, seconds)

    def _began(self, request: Request) -> None:
        request.ledger.first_token = self.clock()
        request.mark = self.spent


def ask_of(request: Request) -> Ask:
    return Ask(
        id=str(request.id),
        prompt=request.prompt,
        params=request.params,
        priority=request.priority,
        salt=request.salt,
        eos_ids=sorted(request.eos_ids),
        reader=request.reader,
    )


def ended_output(request: Request, end: Ended) -> Output:
    """A request that was over with its first token, or failed."""
    if end.token is not None:
        request.outputs.append(end.token)
    request.finish, request.stop_reason = end.finish, end.stop_reason
    request.error = end.error
    return output_of(request, end.token, True, end.logprobs)


def output_of(
    request: Request, token: int | None, finished: bool, logprobs: TokenLogprobs | None = None
) -> Output:
    tokens = [] if token is None else [token]
    return Output(request, tokens, finished, None if logprobs is None else [logprobs])
