"""Thread around `PageSender` that serves readers while the engine computes.

    main thread   grant, ready, withdraw --lock-- PageSender ------lock------ thread: events -> answers
                  freed() <------------------------------------- queue, what is not read any more

A reader that gets no answer for the length of a lease gives up, and a step of the engine may take longer than that.
"""

import queue
import threading
from collections.abc import Callable, Sequence

from cairn.comm.transfer.handover_messages import Offer
from cairn.comm.transfer.handshake import Side
from cairn.comm.transfer.lease import Freed, Terms
from cairn.comm.transfer.page_sender import PageSender, offer_of
from cairn.comm.transfer.transport import Transport
from cairn.core.errors import CairnError

LOOK_S = 0.05  # the longest wait for an event; leases end at most so much late
CLOSE_S = 5.0


class SenderThread:
    def __init__(
        self, transport: Transport, side: Side, terms: Terms, clock: Callable[[], float]
    ) -> None:
        self._transport, self._clock = transport, clock
        self._pages, self._lock = PageSender(transport, side, terms), threading.Lock()
        self._freed: queue.SimpleQueue[Freed] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._broken: str | None = None
        self.address = self._pages.listen()
        self._thread = threading.Thread(target=self._answer, name="hand-over", daemon=True)
        self._thread.start()

    def grant(self, request: str, table: Sequence[int], tokens: int) -> Offer:
        """Reserve blocks for the reader that accepts the offer."""
        with self._lock:
            self._pages.grant(request, table, self._clock())
        return offer_of([self._pages], [self.address], request, table, tokens)

    def begin(self, reader: str, request: str, table: Sequence[int], tokens: int) -> Offer | None:
        """Reserve the blocks of a prompt that becomes `ready` chunk by chunk; None if the reader is not connected.

        `reader`: the name of its transport, and behind a slash what it calls the request.
        """
        receiver, _, name = reader.partition("/")
        with self._lock:
            if not self._pages.is_connected(receiver):
                return None
            self._pages.grant(request, table, self._clock(), ready=False)
            offer = offer_of([self._pages], [self.address], request, table, tokens, chunked=True)
            self._pages.announce(receiver, name, offer)
        return offer

    def ready(self, request: str, tokens: int) -> None:
        with self._lock:
            self._pages.ready(request, tokens)

    def withdraw(self, request: str) -> list[Freed]:
        with self._lock:
            return self._pages.withdraw(request, self._clock())

    def freed(self, wait_s: float = 0.0) -> list[Freed]:
        """Return the blocks freed since the last call; wait for the first up to `wait_s`."""
        if self._broken is not None:
            raise CairnError(f"readers are not answered any more: {self._broken}")
        grants: list[Freed] = []
        try:
            grants.append(self._freed.get(timeout=wait_s) if wait_s else self._freed.get_nowait())
            while True:
                grants.append(self._freed.get_nowait())
        except queue.Empty:
            return grants

    def close(self) -> None:
        self._closed.set()
        self._thread.join(CLOSE_S)
        self._transport.close()

    def _answer(self) -> None:
        try:
            while not self._closed.is_set():
                events = self._transport.events(LOOK_S)
                with self._lock:
                    freed = self._pages.handle(events, self._clock())
                for one in freed:
                    self._freed.put(one)
        except Exception as problem:  # noqa: BLE001  the owner of this side raises it
            self._broken = f"{type(problem).__name__}: {problem}"
