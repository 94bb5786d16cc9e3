"""The receiving side of a KV transfer: reads the pages of a sequence from the ranks that computed them.

    receive(offer) -> claimed at every rank -> reads, layers or chunks as they are ready
        -> Received | NotReceived(reason)

Bytes of a source count only if our lease on its pages was still valid when they had arrived. An outcome is reported
only when no read of the request is in flight, so its target pages are free to use or to give to another request.
`step` returns at once. After NotReceived the engine computes the sequence itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

from cairn.comm.transfer.errors import TransferError, TransferRefused
from cairn.comm.transfer.handover_messages import Answer, Beat, Begun, Offer, Ready, decode, encode
from cairn.comm.transfer.handshake import Side, judge, say_hello
from cairn.comm.transfer.kv import REGION, check_contents, plan_kv
from cairn.comm.transfer.lease import TERMS, LeaseHolder, Terms
from cairn.comm.transfer.plan import Leg
from cairn.comm.transfer.sequence_reads import SequenceReads
from cairn.comm.transfer.transport import (
    Event,
    Notification,
    PeerGone,
    PeerJoined,
    TransferDone,
    TransferFailed,
    Transport,
)


class Received(NamedTuple):
    request: str


class NotReceived(NamedTuple):
    request: str
    reason: str


class PageReceiver:
    def __init__(self, transport: Transport, side: Side, terms: Terms = TERMS) -> None:
        self.transport, self.side, self.terms = transport, side, terms
        self.sequences: dict[str, SequenceReads] = {}
        self._met: dict[str, str] = {}  # address -> peer
        self._holders: dict[str, LeaseHolder] = {}  # peer -> our leases there
        self._done: dict[str, set[str]] = {}  # peer -> requests to release
        self._next_beat: dict[str, float] = {}
        self._last_note: dict[str, float] = {}  # peer -> when its last note came
        self._sides: dict[str, Side] = {}  # peer -> the identity in its greeting
        self._begun: list[Begun] = []

    def listen(self) -> str:
        return self.transport.listen(say_hello(self.side))

    def meet(self, address: str) -> str:
        """Connect ahead of time: a first connection costs more than a transfer."""
        if address not in self._met:
            peer = self.transport.connect(address)
            self._met[address] = peer
            self._holders[peer], self._done[peer] = LeaseHolder(self.terms), set()
            self._next_beat[peer] = 0.0
        return self._met[address]

    def receive(self, offer: Offer, table: Sequence[int], now: float, start: int = 0) -> None:
        """Read tokens start.. into our pages `table`; those before are here already."""
        if offer.request in self.sequences:
            raise TransferError(f"{offer.request!r} is being taken already")
        check_contents(offer.layout, self.side.layout)
        chunks, tokens = self._chunks(offer), (start, offer.tokens)
        plans = [self._planned(offer, table, tokens, chunk) for chunk in chunks]
        peers = [self.meet(address) for address in offer.addresses]
        self.sequences[offer.request] = SequenceReads(
            offer, peers, chunks, plans, now, table, start
        )
        for peer in peers:  # at once: `step` waits for events before it sends any
            self._next_beat[peer] = now
            self._beat(peer, now)

    def begun(self) -> list[Begun]:
        """Offers of what is still being computed, since the last call."""
        offers, self._begun = self._begun, []
        return offers

    def decline(self, offer: Offer, now: float) -> None:
        """Decline an offer, so that the sender can free its blocks."""
        for address in offer.addresses:
            peer = self.meet(address)
            self._done[peer].add(offer.request)
            self._next_beat[peer] = now

    def cancel(self, request: str) -> None:
        if request in self.sequences:
            self.sequences[request].fail("cancelled")

    def step(self, now: float, wait_s: float = 0.0) -> list[Received | NotReceived]:
        for event in self.transport.events(wait_s):
            self._handle(event, now)
        for sequence in self.sequences.values():
            self._post(sequence, now)
        outcomes = self._outcomes(now)
        for peer in list(self._holders):
            self._beat(peer, now)
        return outcomes

    # -- incoming events ----------------------------------------------------------------------

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, PeerJoined):
            try:
                self._sides[event.peer] = judge(self.side, event.greeting)
            except TransferRefused as refusal:
                self._fail(event.peer, refusal.message)
                self.transport.drop(event.peer)
        elif isinstance(event, Notification) and event.peer in self._holders:
            self._handle_note(event, now)
        elif isinstance(event, PeerGone):
            self._forget(event)
        elif isinstance(event, TransferDone | TransferFailed):
            self._end(event, now)

    def _handle_note(self, note: Notification, now: float) -> None:
        self._last_note[note.peer] = now
        try:
            message = decode(note.payload)
        except TransferError as error:
            self._fail(note.peer, error.message)
            self.transport.drop(note.peer)
            return
        if isinstance(message, Answer):
            granted = [request for request in message.granted if request in self.sequences]
            self._holders[note.peer].answered(message.number, granted)
            self._done[note.peer] -= set(message.closed)
            for request in message.gone:
                if request in self.sequences:
                    self.sequences[request].fail(f"{note.peer} has given its pages away")
        if isinstance(message, Begun):
            self._begun.append(message)
        received = {message.request: message.count} if isinstance(message, Ready) else {}
        received = message.granted if isinstance(message, Answer) else received
        for request, count in received.items():
            if request in self.sequences:
                self.sequences[request].now_ready(note.peer, count)

    def _end(self, event: TransferDone | TransferFailed, now: float) -> None:
        for sequence in self.sequences.values():
            if sequence.ended(event.ticket):
                request = sequence.offer.request
                if isinstance(event, TransferFailed):
                    sequence.fail(event.reason)
                elif not self._may_read(event.peer, request, now):
                    sequence.fail(f"the lease on the pages of {event.peer} ran out")

    def _forget(self, lost: PeerGone) -> None:
        self._fail(lost.peer, f"{lost.peer} is lost: {lost.reason}")
        self._met = {address: peer for address, peer in self._met.items() if peer != lost.peer}
        for book in (self._holders, self._done, self._next_beat, self._sides, self._last_note):
            book.pop(lost.peer, None)

    def _fail(self, peer: str, reason: str) -> None:
        for sequence in self.sequences.values():
            if peer in sequence.peers:
                sequence.fail(reason)

    # -- reads and heartbeats -----------------------------------------------------------------

    def _chunks(self, offer: Offer) -> list[tuple[int, int]]:
        """Layers that travel together; none where the tokens of a chunk are planned when they are ready."""
        layers = self.side.layout.contents.layers
        if offer.chunked:
            return []
        return [(n, n + 1) for n in range(layers)] if offer.streamed else [(0, layers)]

    def _planned(
        self,
        offer: Offer,
        table: Sequence[int],
        tokens: tuple[int, int],
        layers: tuple[int, int] | None = None,
    ) -> list[Leg]:
        plan = plan_kv(offer.layout, offer.table, self.side.layout, table, tokens, layers)
        return plan.to_rank(self.side.rank)

    def _plan_next(self, sequence: SequenceReads) -> None:
        if (tokens := sequence.next_chunk()) is not None:
            try:
                sequence.plan(tokens[1], self._planned(sequence.offer, sequence.table, tokens))
            except TransferError as error:
                sequence.fail(error.message)

    def _post(self, sequence: SequenceReads, now: float) -> None:
        request = sequence.offer.request
        self._plan_next(sequence)
        for peer, leg in sequence.postable():
            if not self._may_read(peer, request, now):
                continue
            if self._is_other_engine(sequence, peer):
                sequence.fail(f"{peer} is not the engine that made the offer: it was restarted")
                return
            try:
                ticket = self.transport.read(peer, leg.source_region, REGION, leg.runs)
            except TransferError as error:
                sequence.fail(error.message)
                return
            sequence.posted(peer, leg, ticket, now)

    def _may_read(self, peer: str, request: str, now: float) -> bool:
        holder = self._holders.get(peer)
        return holder is not None and holder.may_read(request, now)

    def _is_other_engine(self, sequence: SequenceReads, peer: str) -> bool:
        side, rank = self._sides.get(peer), sequence.peers.index(peer)
        return side is None or (side.engine, side.rank) != (sequence.offer.engine, rank)

    def _outcomes(self, now: float) -> list[Received | NotReceived]:
        outcomes: list[Received | NotReceived] = []
        for request, sequence in list(self.sequences.items()):
            self._check_patience(sequence, now)
            if sequence.failed is not None and sequence.under_way:
                # What is under way may still land: only a cut connection makes sure that it does not.
                if sequence.oldest is not None and now - sequence.oldest > self.terms.lease_s:
                    for peer in sequence.busy_peers():
                        self.transport.drop(peer)
                continue
            if sequence.failed is None and not sequence.complete():
                continue
            for peer in set(sequence.peers) & self._done.keys():
                self._done[peer].add(request)
                self._holders[peer].drop(request)
                self._next_beat[peer] = now
            del self.sequences[request]
            reason = sequence.failed
            outcomes.append(Received(request) if reason is None else NotReceived(request, reason))
        return outcomes

    def _check_patience(self, sequence: SequenceReads, now: float) -> None:
        if sequence.oldest is not None and now - sequence.oldest > self.terms.read_s:
            sequence.fail(f"no end of a read for {self.terms.read_s:g} s")
        for peer in sequence.peers:
            silent_s = now - max(sequence.since, self._last_note.get(peer, 0.0))
            if silent_s > self.terms.lease_s:
                sequence.fail(f"{peer} has not answered for {silent_s:.1f} s")

    def _beat(self, peer: str, now: float) -> None:
        holding = [
            request for request, sequence in self.sequences.items() if peer in sequence.peers
        ]
        done = sorted(self._done[peer])
        if now >= self._next_beat[peer] and (holding or done):
            beat = Beat(self._holders[peer].beat(now), self.side.layout.ranks, holding, done)
            self.transport.notify(peer, encode(beat))
            self._next_beat[peer] = now + self.terms.beat_s
