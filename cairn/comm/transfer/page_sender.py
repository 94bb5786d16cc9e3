"""The sending side of a KV transfer: lets other ranks read the pages of a sequence, and says when they are free again.

    grant -> (announce, ready, ready, ..) -> Freed(request, pages, why)

`step` handles whatever has arrived and returns at once; call it in the loop of an engine, or from a thread. Each rank
of an engine has a PageSender of its own. Pages come back exactly once, whatever happens to their readers.
"""

from collections.abc import Sequence

from cairn.comm.transfer.errors import TransferError, TransferRefused
from cairn.comm.transfer.handover_messages import Answer, Beat, Begun, Offer, Ready, decode, encode
from cairn.comm.transfer.handshake import Side, judge, say_hello
from cairn.comm.transfer.lease import TERMS, Freed, Owner, Terms
from cairn.comm.transfer.transport import Event, Notification, PeerGone, PeerJoined, Transport


class PageSender:
    def __init__(self, transport: Transport, side: Side, terms: Terms = TERMS) -> None:
        self.transport, self.side = transport, side
        self.owner = Owner(terms)
        self.refused: list[str] = []  # what was said to those who do not fit
        self._receivers: set[str] = set()
        self._ready: dict[str, int] = {}  # request -> layers, or tokens of a chunked offer
        self._subscribers: dict[str, set[str]] = {}  # request -> who hears what is ready

    def listen(self) -> str:
        return self.transport.listen(say_hello(self.side))

    def grant(self, request: str, table: Sequence[int], now: float, ready: bool = True) -> None:
        """Reserve the blocks for the receiver of the offer. `ready`: all layers are computed."""
        self.owner.grant(request, table, now)
        self._ready[request] = self.side.layout.contents.layers if ready else 0
        self._subscribers[request] = set()

    def is_connected(self, receiver: str) -> bool:
        return receiver in self._receivers

    def announce(self, receiver: str, reader: str, offer: Offer) -> None:
        """Tell a receiver of an offer before the requester hears that it is computed; `reader`: its name there."""
        self.transport.notify(receiver, encode(Begun(reader, offer)))

    def ready(self, request: str, count: int) -> None:
        """So many layers, or tokens of a chunked offer, are computed, as far as this rank holds them."""
        if request in self._ready:
            self._ready[request] = max(count, self._ready[request])
            for receiver in self._subscribers[request]:
                self.transport.notify(receiver, encode(Ready(request, self._ready[request])))

    def withdraw(self, request: str, now: float) -> list[Freed]:
        """The request was cancelled. Free at once, or when those who read are through."""
        return self._freed(self.owner.withdraw(request, now))

    def step(self, now: float, wait_s: float = 0.0) -> list[Freed]:
        return self.handle(self.transport.events(wait_s), now)

    def handle(self, events: Sequence[Event], now: float) -> list[Freed]:
        """Handle events that have arrived. A thread that waits for events calls this under a lock."""
        freed: list[Freed] = []
        for event in events:
            if isinstance(event, PeerJoined):
                self._welcome(event)
            elif isinstance(event, PeerGone):
                self._receivers.discard(event.peer)
                # One that is only silent may still read: its lease has to run out.
                freed += self.owner.lost(event.peer, now) if event.dead else []
            elif isinstance(event, Notification) and event.peer in self._receivers:
                freed += self._hear(event, now)
        return self._freed(freed + self.owner.expire(now))

    def _welcome(self, joined: PeerJoined) -> None:
        try:
            judge(self.side, joined.greeting)
            self._receivers.add(joined.peer)
        except TransferRefused as refusal:
            self.refused.append(refusal.message)
            self.transport.drop(joined.peer)

    def _hear(self, note: Notification, now: float) -> list[Freed]:
        try:
            beat = decode(note.payload)
        except TransferError as error:
            self.refused.append(f"{note.peer}: {error.message}")
            self.transport.drop(note.peer)
            return []
        if not isinstance(beat, Beat):
            return []
        freed = [
            one
            for request in beat.done
            for one in self.owner.release(request, note.peer, beat.holders, now)
        ]
        granted, gone = {}, []
        for request in beat.holding:
            if self.owner.renew(request, note.peer, beat.holders, now):
                granted[request] = self._ready[request]
                self._subscribers[request].add(note.peer)
            else:
                gone.append(request)
        answer = Answer(beat.number, granted, gone, beat.done)
        self.transport.notify(note.peer, encode(answer))
        return freed

    def _freed(self, freed: list[Freed]) -> list[Freed]:
        for one in freed:
            self._ready.pop(one.request, None)
            self._subscribers.pop(one.request, None)
        return freed


def offer_of(
    senders: Sequence[PageSender],
    addresses: Sequence[str],
    request: str,
    table: Sequence[int],
    tokens: int,
    streamed: bool = False,
    chunked: bool = False,
) -> Offer:
    """The offer that a router passes to the receiver; `senders` and `addresses` are in rank order."""
    side = senders[0].side
    return Offer(
        request=request,
        engine=side.engine,
        layout=side.layout,
        addresses=list(addresses),
        table=list(table),
        tokens=tokens,
        streamed=streamed,
        chunked=chunked,
    )
