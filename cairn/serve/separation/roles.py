"""An engine with a role: one that computes prompts for others, or one that goes on with prompts that others computed.

    prefill   add --PrefillSide--> one token, pages on offer --> the request ends, its Handoff waits for the endpoint
    decode    add --PrefillClient--> Handoff --DecodeSide--> pages arrive --> decodes
                   '- too short, constrained, or no answer: this engine computes the prompt itself

Both have the interface of `Engine`, so that `EngineThread` and a worker process drive them like any other. One thread
owns them.
"""

import os
import queue
from typing import Any, cast

import msgspec

from cairn.serve.config import RoleConfig
from cairn.serve.engine.loop import Engine, Output
from cairn.serve.engine.request import Finish, Request, RequestId
from cairn.serve.engine.runner import TokenLogprobs
from cairn.serve.separation.decode import DecodeSide
from cairn.serve.separation.prefill import Ask, Ended, Handoff, PrefillSide
from cairn.serve.separation.prefill_client import PrefillClient, Reply

HELD_S = 0.005  # between two looks at pages that somebody may have read
REPLY_S = 0.02  # the longest wait for a prefill server when there is nothing to decode


def with_role(engine: Engine, config: RoleConfig) -> Engine:
    """The engine as one half of a pair; it has taken no request yet."""
    where = {"transport": config.transport, "host": config.host}
    if config.role == "prefill":
        return cast(Engine, PrefillEngine(PrefillSide(engine, **where)))
    key = os.environ.get("CAIRN_PREFILL_KEY")
    client = PrefillClient(config.prefill_urls, config.prefill_timeout_s, key)
    side = DecodeSide(engine, **where)
    return cast(Engine, DecodeEngine(side, client, config.prefill_min_tokens))


class PrefillEngine:
    """Every request ends after one token; what is needed to go on elsewhere is its `handoff`."""

    def __init__(self, side: PrefillSide) -> None:
        self.side = side
        self._requests: dict[str, Request] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.side.engine, name)  # whatever is not said here is the engine's own

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

    def step(self) -> list[Output]:
        outputs = []
        for found in self.side.step(HELD_S):
            handoff = isinstance(found, Handoff)
            request = self._requests.pop(found.ask.id if handoff else found.id)
            request.handoff = msgspec.msgpack.encode(found)
            if handoff:
                request.outputs.append(found.first)
                request.finish, request.cached = "length", found.cached
                outputs.append(output_of(request, found.first, True))
            else:
                outputs.append(ended_output(request, found))
        return outputs


class DecodeEngine:
    """Asks another server for the pages of long prompts, and computes them itself where that fails."""

    def __init__(self, side: DecodeSide, client: PrefillClient, min_tokens: int) -> None:
        self.side, self._client, self._min_tokens = side, client, min_tokens
        self.remote_prefills = 0  # prompts that came from elsewhere
        self._unanswered = 0  # prompts that nobody else computed
        self._asked: dict[str, Request] = {}
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.side.engine, name)  # whatever is not said here is the engine's own

    @property
    def has_work(self) -> bool:
        return self.side.has_work or bool(self._asked) or not self._replies.empty()

    @property
    def prefill_fallbacks(self) -> int:
        """Prompts that were asked for elsewhere, and had to be computed here."""
        return self._unanswered + self.side.not_arrived

    def add(self, request: Request) -> None:
        if not self._is_remote(request):
            self.side.engine.add(request)
            return
        now = self.clock()
        ledger = request.ledger
        ledger.arrived = ledger.admitting = ledger.scheduled = now
        ask = ask_of(request)
        self._asked[ask.id] = request
        self._client.ask(ask, self._replies.put)

    def abort(
        self, id: RequestId, reason: Finish = "abort", stop_reason: int | str | None = None
    ) -> Request | None:
        request = self._asked.pop(str(id), None)
        if request is None:
            return self.side.abort(id, reason, stop_reason)
        request.finish, request.stop_reason = reason, stop_reason
        return request

    def step(self) -> list[Output]:
        outputs: list[Output] = []
        wait_s = 0.0 if self.side.has_work else REPLY_S
        while True:
            try:
                reply = self._replies.get(wait_s > 0, wait_s)
            except queue.Empty:
                break
            wait_s = 0.0
            outputs += self._replied(reply)
        return outputs + (self.side.step() if self.side.has_work else [])

    def _is_remote(self, request: Request) -> bool:
        """A constraint does not travel, and what is asked of every prompt token is computed where it is read."""
        short = len(request.prompt) < self._min_tokens
        return not (short or request.constraint is not None or request.params.whole_prompt)

    def _replied(self, reply: Reply) -> list[Output]:
        request, found = self._asked.pop(reply.id, None), reply.found
        if request is None:  # it was aborted meanwhile
            if isinstance(found, Handoff):
                self.side.decline(found)
            return []
        if isinstance(found, Ended) and found.finish in ("stop", "length"):
            self._began(request)
            return [ended_output(request, found)]
        if not isinstance(found, Handoff):
            self._unanswered += 1
            request.ledger.admitting = request.ledger.scheduled = 0.0
            self.side.engine.add(request)
            return []
        self.remote_prefills += 1
        self._began(request)
        self.side.add(found, request)
        return [output_of(request, found.first, False, found.logprobs)]

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
    )


def ended_output(request: Request, found: Ended) -> Output:
    """A request that was over with its first token, or failed."""
    if found.token is not None:
        request.outputs.append(found.token)
    request.finish, request.stop_reason = found.finish, found.stop_reason
    request.error = found.error
    return output_of(request, found.token, True, found.logprobs)


def output_of(
    request: Request, token: int | None, finished: bool, logprobs: TokenLogprobs | None = None
) -> Output:
    tokens = [] if token is None else [token]
    return Output(request, tokens, finished, None if logprobs is None else [logprobs])
