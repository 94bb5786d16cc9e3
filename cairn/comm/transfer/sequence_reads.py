"""Reads of one incoming sequence: pending, in flight, and failed.

    chunks (all layers, or one each)  x  source ranks  ->  waiting -> under way -> in
    tokens, as they are computed: each chunk is planned when all sources have it

A leg is postable when its source says that the chunk is computed. Pure: posts nothing itself, has no clock.
"""

from collections.abc import Sequence
from typing import NamedTuple

from cairn.comm.transfer.handover_messages import Offer
from cairn.comm.transfer.plan import Leg


class PendingReads(NamedTuple):
    count: int  # layers, or tokens of a chunked offer, that have to be ready
    leg: Leg


class ReadInFlight(NamedTuple):
    peer: str
    since: float


class SequenceReads:
    def __init__(
        self,
        offer: Offer,
        peers: list[str],  # in order of their ranks
        chunks: Sequence[tuple[int, int]],
        legs: Sequence[list[Leg]],  # of each chunk, those that come to us
        since: float,
        table: Sequence[int] = (),  # where a chunked offer is read into
        start: int = 0,  # tokens of it that are here already
    ) -> None:
        self.offer, self.peers, self.since, self.table = offer, peers, since, table
        self.planned = start if offer.chunked else offer.tokens
        self.failed: str | None = None
        self.under_way: dict[int, ReadInFlight] = {}
        self._ready = dict.fromkeys(peers, 0)
        self._waiting: dict[str, list[PendingReads]] = {peer: [] for peer in peers}
        for (_, stop), some in zip(chunks, legs, strict=True):
            self._wait(stop, some)

    @property
    def oldest(self) -> float | None:
        """Since when the longest read has been under way."""
        return min((one.since for one in self.under_way.values()), default=None)

    def now_ready(self, peer: str, count: int) -> None:
        """Said again or out of order, it changes nothing."""
        if peer in self._ready:
            self._ready[peer] = max(count, self._ready[peer])

    def next_chunk(self) -> tuple[int, int] | None:
        """Tokens that every source has computed, and that are not planned yet."""
        stop = min(self.offer.tokens, *self._ready.values())
        return (self.planned, stop) if self.failed is None and stop > self.planned else None

    def plan(self, stop: int, legs: Sequence[Leg]) -> None:
        """The tokens before `stop` have legs now."""
        self.planned = stop
        self._wait(stop, legs)

    def postable(self) -> list[tuple[str, Leg]]:
        if self.failed is not None:
            return []
        return [
            (peer, one.leg)
            for peer, waiting in self._waiting.items()
            for one in waiting
            if one.count <= self._ready[peer]
        ]

    def posted(self, peer: str, leg: Leg, ticket: int, now: float) -> None:
        # By identity: a leg holds arrays, which have no plain equality.
        self._waiting[peer] = [one for one in self._waiting[peer] if one.leg is not leg]
        self.under_way[ticket] = ReadInFlight(peer, now)

    def ended(self, ticket: int) -> bool:
        """Remove a read that has ended; return whether it was in flight."""
        return self.under_way.pop(ticket, None) is not None

    def fail(self, reason: str) -> None:
        self.failed = self.failed or reason

    def complete(self) -> bool:
        all_planned = self.planned >= self.offer.tokens
        return all_planned and not self.under_way and not any(self._waiting.values())

    def busy_peers(self) -> set[str]:
        return {one.peer for one in self.under_way.values()}

    def _wait(self, count: int, legs: Sequence[Leg]) -> None:
        for leg in legs:
            self._waiting[self.peers[leg.source_rank]].append(PendingReads(count, leg))
