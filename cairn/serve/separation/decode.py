"""The side that goes on: reads the pages of a prompt that another engine has computed, then decodes.

    add(Handoff) --reserve pages--> take --bytes--> the scheduler admits it as if it had computed the prompt
                       |              '- not taken: it computes the prompt itself, and nobody notices but the clock
                       '- no room yet: waits its turn

`step` does whatever there is to do and returns; one thread owns a side. Every hand-over leaves an `Arrival`: how many
bytes, how long, and why not where it was not.
"""

import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable

import msgspec

from cairn.comm.transfer.choose import make_transport
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.handshake import Side
from cairn.comm.transfer.lease import TERMS, Terms
from cairn.comm.transfer.take import NotTaken, Take, Taken
from cairn.serve.engine.loop import Engine, Output
from cairn.serve.engine.request import Finish, Request, RequestId, check_request
from cairn.serve.separation.memory import KVMemory
from cairn.serve.separation.prefill import Handoff, hold_pages

REMEMBERED = 4096  # arrivals
NAP_S = 0.02  # the longest wait for bytes when there is nothing to decode


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one hand-over."""

    id: str
    tokens: int  # of the prompt
    cached: int  # of them, here before
    bytes: int  # that travelled
    waited_s: float  # from `add` until there was room
    moved_s: float  # from then until the last byte
    why_not: str | None = None  # None: it came


class Coming:
    """A hand-over under way."""

    def __init__(self, handoff: Handoff, request: Request, end: int, now: float) -> None:
        self.handoff, self.request, self.end, self.added = handoff, request, end, now
        self.began = now
        self.start = 0  # tokens that are here already
        self.pages: list[int] = []
        self.table: list[int] = []  # where the bytes land


class DecodeSide:
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
        self.engine, self.blocks, self._clock = engine, hold_pages(engine), clock
        self.transport = make_transport(transport, f"decode-{uuid.uuid4().hex[:12]}", host=host)
        self.memory = KVMemory(engine, self.transport, staged)
        side = Side(engine=self.transport.name, rank=0, layout=self.memory.layout)
        self._take = Take(self.transport, side, terms)
        self._take.listen()
        self._line: deque[Coming] = deque()  # no room yet
        self._coming: dict[str, Coming] = {}  # by offer
        self.arrivals: deque[Arrival] = deque(maxlen=REMEMBERED)
        self.on_arrival: Callable[[Arrival], None] | None = None
        self.not_arrived = 0  # hand-overs whose prompts were computed here

    @property
    def has_work(self) -> bool:
        return self.engine.has_work or bool(self._line or self._coming)

    def meet(self, address: str) -> None:
        """Connect ahead of the first hand-over, which would have to wait for it."""
        self._take.meet(address)

    def add(self, handoff: Handoff, request: Request | None = None) -> None:
        """In line, or refused with a RequestError: this engine may be smaller than the other.

        `request`: the one that goes on; by default it is made from the hand-over.
        """
        request = handoff.ask.request() if request is None else request
        check_request(request, self.engine.scheduler.limits)
        request.outputs.append(handoff.first)
        request.total += 1
        most, context = request.params.max_tokens, self.engine.scheduler.limits.context
        end = min(len(request.prompt) + most, context) if most is not None else context
        self._line.append(Coming(handoff, request, end, self._clock()))

    def decline(self, handoff: Handoff) -> None:
        """Nobody wants it any more: its pages may be freed."""
        with contextlib.suppress(TransferError):  # a giver that is gone needs no word
            self._take.decline(handoff.offer, self._clock())

    def abort(
        self, id: RequestId, reason: Finish = "abort", stop_reason: int | str | None = None
    ) -> Request | None:
        """Wherever it is. Bytes that are under way still land, in pages that are still its own."""
        found = None
        for one in [one for one in self._line if one.request.id == id]:
            self._line.remove(one)
            self.decline(one.handoff)
            found = one.request
        for offer, one in self._coming.items():
            if one.request.id == id:
                self._take.cancel(offer)
                one.end = 0  # nobody wants it any more
                found = one.request
        if (request := self.engine.abort(id, reason, stop_reason)) is not None:
            self.blocks.give_up(id)
            return request
        if found is not None:
            found.finish, found.stop_reason = reason, stop_reason
        return found

    def step(self, wait_s: float = NAP_S) -> list[Output]:
        """`wait_s`: how long to wait for bytes if there is nothing to decode."""
        now = self._clock()
        self._begin(now)
        wait = 0.0 if self.engine.has_work else wait_s
        for outcome in self._take.step(now, wait if self._coming else 0.0):
            self._end(outcome, self._clock())
        return self.engine.step() if self.engine.has_work else []

    def close(self) -> None:
        self.transport.close()

    def _begin(self, now: float) -> None:
        """Pages for the first in line, and its bytes on their way."""
        while self._line:
            one = self._line[0]
            ends = [other.end for other in (*self._line, *self._coming.values())]
            stand_in = self.blocks.reserve(one.request, [*ends, *self._ends()])
            pages = [] if stand_in is None else self.blocks.seen(stand_in, len(one.request.prompt))
            table = self.memory.place(pages) if stand_in is not None else None
            if stand_in is None or table is None:
                self.blocks.give_up(one.request.id)
                if not self._coming and not self.engine.has_work:
                    self._line.popleft()
                    self.decline(one.handoff)
                    self._compute_here(one, now, "its pages do not fit beside those it will need")
                    continue
                return
            self._line.popleft()
            if self.engine.tiers is not None:  # what these pages held may still be copied out
                self.engine.tiers.hold_steps()
            one.began, one.start, one.pages, one.table = (
                now,
                stand_in.computed,
                pages,
                table,
            )
            try:
                self._take.take(one.handoff.offer, table, now, one.start)
            except TransferError as error:
                self._not_here(one, now, error.message)
                continue
            self._coming[one.handoff.offer.request] = one

    def _ends(self) -> list[int]:
        return [request.end for request in self.engine.scheduler.requests.values()]

    def _end(self, outcome: Taken | NotTaken, now: float) -> None:
        one = self._coming.pop(outcome.request)
        if isinstance(outcome, NotTaken):
            self._not_here(one, now, outcome.reason)
            return
        self.memory.copy_home(one.table, one.pages)
        self.memory.take_back(one.table)
        self.blocks.arrived(one.request.id)
        self._note(one, now, None)
        if one.end == 0:
            self.blocks.give_up(one.request.id)
        else:
            self.engine.add(one.request)

    def _not_here(self, one: Coming, now: float, reason: str) -> None:
        self.memory.take_back(one.table)
        self.blocks.give_up(one.request.id)
        self._compute_here(one, now, reason)

    def _compute_here(self, one: Coming, now: float, reason: str) -> None:
        self._note(one, now, reason)
        self.not_arrived += 1
        if one.end:
            self.engine.add(one.request)

    def _note(self, one: Coming, now: float, why_not: str | None) -> None:
        tokens = len(one.request.prompt)
        moved = self.memory.bytes_of(tokens, one.start) if why_not is None else 0
        arrival = Arrival(
            id=str(one.request.id), tokens=tokens, cached=one.start, bytes=moved,
            waited_s=one.began - one.added, moved_s=now - one.began, why_not=why_not,
        )  # fmt: skip
        self.arrivals.append(arrival)
        if self.on_arrival is not None:
            self.on_arrival(arrival)
