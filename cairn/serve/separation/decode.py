"""The side that goes on: reads the pages of a prompt that another engine has computed, then decodes.

    add(Handoff) --reserve pages--> take --bytes--> the scheduler admits it as if it had computed the prompt
                       |              '- not taken: it computes the prompt itself: the same answer, later
                       '- no room yet: waits its turn
    expect(request) .. Begun --reserve pages--> take, chunk by chunk .. add(Handoff): it may be here already
                         '- no room: nothing is lost, it comes with the hand-over

`step` does whatever there is to do and returns; one thread owns a side. Every hand-over leaves an `Arrival`: how many
bytes, how long, and why not where it was not.
"""

import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable

import msgspec

from cairn.comm.transfer.choose_transport import make_transport
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.handover_messages import Offer
from cairn.comm.transfer.handshake import Side
from cairn.comm.transfer.lease import TERMS, Terms
from cairn.comm.transfer.page_receiver import NotReceived, PageReceiver, Received
from cairn.core.errors import RequestError
from cairn.serve.engine.loop import Engine, Output
from cairn.serve.engine.request import Finish, Request, RequestId
from cairn.serve.engine.request_checks import check_request
from cairn.serve.separation.memory import KVMemory
from cairn.serve.separation.prefill import Handoff, hold_pages

REMEMBERED = 4096  # arrivals
NAP_S = 0.02  # the longest wait for bytes when there is nothing to decode
LOOK_S = 0.01  # and when a first token may come, which does not end the wait


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a hand-over."""

    id: str
    tokens: int  # of the prompt
    cached: int  # of them, here before
    bytes: int  # that travelled
    waited_s: float  # from `add` until there was room
    moved_s: float  # from then until the last byte
    why_not: str | None = None  # None: it came
    streamed: bool = False  # it began before the prompt was computed: `moved_s` is what was left


class Coming:
    """A hand-over under way."""

    def __init__(
        self, offer: Offer, request: Request, end: int, now: float, streamed: bool = False
    ) -> None:
        self.offer, self.request, self.end, self.added = offer, request, end, now
        self.streamed = streamed
        self.is_computed = not streamed  # and its first token is known
        self.began = now  # or, of a stream, when its first token came
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
        self._receiver = PageReceiver(self.transport, side, terms)
        self._receiver.listen()
        self._line: deque[Coming] = deque()  # no room yet
        self._coming: dict[str, Coming] = {}  # by offer
        self._expected: dict[str, Request] = {}  # asked for, and nothing is known of its pages
        self._here: dict[str, Coming] = {}  # all pages have come, and no first token
        self.arrivals: deque[Arrival] = deque(maxlen=REMEMBERED)
        self.on_arrival: Callable[[Arrival], None] | None = None
        self.not_arrived = 0  # hand-overs whose prompts were computed here

    @property
    def has_work(self) -> bool:
        return self.engine.has_work or bool(self._line or self._coming)

    @property
    def expects(self) -> bool:
        """Return whether hand-overs may be announced, for which `step` must poll."""
        return bool(self._expected)

    def meet(self, address: str) -> None:
        """Connect ahead of the first hand-over, which would have to wait for it."""
        self._receiver.meet(address)

    def add(self, handoff: Handoff, request: Request | None = None) -> None:
        """Queue a hand-over, or raise a RequestError, because this engine may be smaller than the other.

        `request`: the one that goes on; by default it is made from the hand-over.
        """
        self._expected.pop(handoff.ask.id, None)
        stream = self._stream_of(handoff.ask.id)
        if request is None:
            request = handoff.ask.request() if stream is None else stream.request
        check_request(request, self.engine.scheduler.limits)
        request.outputs.append(handoff.first)
        request.total += 1
        now = self._clock()
        if stream is None:
            self._line.append(Coming(handoff.offer, request, self._end_of(request), now))
        elif stream.offer.request == handoff.offer.request:
            self._first_token(stream, now)
        else:  # its stream broke there, and has not ended here yet
            self.forget(handoff.ask.id)
            self.decline(handoff.offer)
            again = Coming(handoff.offer, request, self._end_of(request), now)
            self._compute_here(again, now, "its pages were withdrawn while they came")

    def expect(self, request: Request) -> str:
        """A prompt that another engine is asked for; the `Ask.reader` that lets its pages come while it is computed.

        Ends with `add` or `forget`.
        """
        self._expected[str(request.id)] = request
        return f"{self.transport.name}/{request.id}"

    def forget(self, id: RequestId) -> Request | None:
        """No hand-over of this request will come. Bytes under way still land, in pages that are held until then."""
        expected = self._expected.pop(str(id), None)
        stream = self._stream_of(str(id))
        if stream is None:
            return expected
        if self._here.pop(str(id), None) is not None:
            self.blocks.give_up(stream.request.id)
        else:
            self._receiver.cancel(stream.offer.request)
            stream.end = 0  # it is not wanted any more
        return stream.request

    def decline(self, offer: Offer) -> None:
        """Decline an offer, so that its blocks can be freed."""
        with contextlib.suppress(TransferError):  # a sender that is gone needs no word
            self._receiver.decline(offer, self._clock())

    def abort(
        self, id: RequestId, reason: Finish = "abort", stop_reason: int | str | None = None
    ) -> Request | None:
        """Wherever it is. Bytes that are under way still land, in pages that are still its own."""
        aborted = self.forget(id)
        for one in [one for one in self._line if one.request.id == id]:
            self._line.remove(one)
            self.decline(one.offer)
            aborted = one.request
        for offer, one in self._coming.items():
            if one.request.id == id:
                self._receiver.cancel(offer)
                one.end = 0  # it is not wanted any more
                aborted = one.request
        if (request := self.engine.abort(id, reason, stop_reason)) is not None:
            self.blocks.give_up(id)
            return request
        if aborted is not None:
            aborted.finish, aborted.stop_reason = reason, stop_reason
        return aborted

    def request_ids(self) -> list[RequestId]:
        """Ids of all requests, including those whose blocks are in transfer or pending."""
        coming = [one for one in (*self._line, *self._coming.values()) if one.end]
        ids = [one.request.id for one in (*coming, *self._here.values())]
        return list(dict.fromkeys([*ids, *self.engine.request_ids()]))

    def step(self, wait_s: float = NAP_S) -> list[Output]:
        """`wait_s`: how long to wait for bytes if there is nothing to decode."""
        now = self._clock()
        self._begin(now)
        self._begin_streams(now)
        if not all(one.is_computed for one in self._coming.values()):
            wait_s = min(wait_s, LOOK_S)
        wait = 0.0 if self.engine.has_work else wait_s
        for outcome in self._receiver.step(now, wait if self._coming else 0.0):
            self._end(outcome, self._clock())
        return self.engine.step() if self.engine.has_work else []

    def close(self) -> None:
        self.transport.close()

    def _begin(self, now: float) -> None:
        """Pages for the first in line, and its bytes on their way."""
        while self._line:
            one = self._line[0]
            if self._reserve(one, now):
                self._line.popleft()
                self._read(one, now)
            elif not self._coming and not self.engine.has_work:
                self._line.popleft()
                self.decline(one.offer)
                self._compute_here(one, now, "its pages do not fit beside those it will need")
            else:
                return

    def _begin_streams(self, now: float) -> None:
        """Pages that are still being computed come if there is room for them now; else later, with their hand-over."""
        for begun in self._receiver.begun():
            request = self._expected.pop(begun.reader, None)
            if request is None or self._line:
                continue
            with contextlib.suppress(RequestError):  # reported with the hand-over
                check_request(request, self.engine.scheduler.limits)
                one = Coming(begun.offer, request, self._end_of(request), now, streamed=True)
                if self._reserve(one, now):
                    self._read(one, now)

    def _reserve(self, one: Coming, now: float) -> bool:
        """Pages for its bytes, or nothing."""
        ends = [other.end for other in (one, *self._line, *self._coming.values())]
        stand_in = self.blocks.reserve(one.request, [*ends, *self._ends()])
        pages = [] if stand_in is None else self.blocks.seen(stand_in, len(one.request.prompt))
        table = self.memory.place(pages) if stand_in is not None else None
        if stand_in is None or table is None:
            self.blocks.give_up(one.request.id)
            return False
        one.began, one.start, one.pages, one.table = now, stand_in.computed, pages, table
        return True

    def _read(self, one: Coming, now: float) -> None:
        if self.engine.tiers is not None:  # what these pages held may still be copied out
            self.engine.tiers.hold_steps()
        try:
            self._receiver.receive(one.offer, one.table, now, one.start)
            self._coming[one.offer.request] = one
        except TransferError as error:
            self._not_here(one, now, error.message)

    def _stream_of(self, id: str) -> Coming | None:
        """The streamed hand-over of a prompt that is still being computed, or None."""
        for one in (*self._coming.values(), *self._here.values()):
            if str(one.request.id) == id and one.end and not one.is_computed:
                return one
        return None

    def _first_token(self, one: Coming, now: float) -> None:
        """The prompt of a stream is computed."""
        one.is_computed, one.added, one.began = True, now, now
        if self._here.pop(str(one.request.id), None) is not None:
            self._note(one, now, None)
            self.engine.add(one.request)

    def _end_of(self, request: Request) -> int:
        """Tokens that it may grow to."""
        most, context = request.params.max_tokens, self.engine.scheduler.limits.context
        return min(len(request.prompt) + most, context) if most is not None else context

    def _ends(self) -> list[int]:
        return [request.end for request in self.engine.scheduler.requests.values()]

    def _end(self, outcome: Received | NotReceived, now: float) -> None:
        one = self._coming.pop(outcome.request)
        if isinstance(outcome, NotReceived):
            self._not_here(one, now, outcome.reason)
            return
        self.memory.copy_home(one.table, one.pages)
        self.memory.take_back(one.table)
        self.blocks.arrived(one.request.id)
        if one.end == 0:
            self.blocks.give_up(one.request.id)
        elif one.is_computed:
            self._note(one, now, None)
            self.engine.add(one.request)
        else:
            self._here[str(one.request.id)] = one

    def _not_here(self, one: Coming, now: float, reason: str) -> None:
        self.memory.take_back(one.table)
        self.blocks.give_up(one.request.id)
        if one.is_computed:  # otherwise its hand-over, or word that there is none, is still to come
            self._compute_here(one, now, reason)

    def _compute_here(self, one: Coming, now: float, reason: str) -> None:
        self._note(one, now, reason)
        if one.end:
            self.not_arrived += 1
            self.engine.add(one.request)

    def _note(self, one: Coming, now: float, why_not: str | None) -> None:
        tokens = len(one.request.prompt)
        moved = self.memory.bytes_of(tokens, one.start) if why_not is None else 0
        arrival = Arrival(
            id=str(one.request.id),
            tokens=tokens,
            cached=one.start,
            bytes=moved,
            waited_s=one.began - one.added,
            moved_s=now - one.began,
            why_not=why_not,
            streamed=one.streamed,
        )
        self.arrivals.append(arrival)
        if self.on_arrival is not None:
            self.on_arrival(arrival)
