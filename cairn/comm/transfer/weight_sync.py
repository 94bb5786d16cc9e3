"""Sends weights from the ranks of a trainer to the ranks of a server, which may shard them differently.

    trainer, rank r                                server, rank s
    source = WeightSource(end, held[r])            sink = WeightSink(end, wanted[s], held, addresses)
    source.memory: fill it
    source.publish(7)           -- note: 7 -->     sink.pull(7)    reads what its plan says, from all ranks
    source.until_taken(7, 2)    <-- note: 7 --     sink.memory: these are the weights of step 7

`make_plan` decides which rank reads which bytes: every byte once, in the longest runs, and ranks that hold the same
shard share the work. The trainer may change its memory when `until_taken` has returned, so no reader ever sees half
of a step. A side whose layout is not the expected one is refused before a byte is read; errors name a side that dies
or never connects. Each end needs a thread or a process of its own, because it handles events only while it waits.
The transport is shared memory, TCP, or NIXL.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from cairn.comm.transfer.errors import PeerLost, TransferError, TransferRefused
from cairn.comm.transfer.plan import Leg, make_plan
from cairn.comm.transfer.transport import (
    Event,
    Notification,
    PeerGone,
    PeerJoined,
    TransferDone,
    TransferFailed,
    Transport,
)
from cairn.comm.transfer.weights import REGION, PackedWeightShards

POLL_S = 0.2  # how long one wait for events lasts


class WeightVersion(msgspec.Struct, frozen=True):
    """The payload of a note: a source has published this version, or a sink has read it."""

    version: int


class SourceLayout(msgspec.Struct, frozen=True):
    """Description of a source's layout in the greeting of a connection."""

    fingerprint: str
    words: str


def cut_of_rank(held: PackedWeightShards) -> SourceLayout:
    """The same for two ranks exactly if every rectangle lies at the same byte and has the same number type."""
    shards = held.shards
    rows = [[s.tensor, s.rank, s.base, s.itemsize, s.box] for s in shards]
    digest = hashlib.sha256(msgspec.json.encode([held.dtype, rows])).hexdigest()[:32]
    total = sum(shard.nbytes for shard in shards)
    rank = shards[0].rank if shards else "?"
    kind = f" of {held.dtype}" if held.dtype else ""
    return SourceLayout(digest, f"rank {rank}: {len(shards)} pieces, {total:,} bytes{kind}")


class WeightSource:
    """A rank that publishes weights. `memory` contains them in the layout `held`."""

    def __init__(self, end: Transport, held: PackedWeightShards) -> None:
        self.end, self.held = end, held
        self.memory = end.allocate(REGION, max(held.nbytes, 1))
        self.address = end.listen(msgspec.msgpack.encode(cut_of_rank(held)))
        self.version: int | None = None
        self._readers: set[str] = set()
        self._taken: dict[str, int] = {}
        self._lost: dict[str, str] = {}

    def publish(self, version: int) -> None:
        """Allow readers to read a version. The memory must not change until they have finished."""
        self.version = version
        self._poll(0.0)
        for peer in self._readers:
            self._announce(peer)

    def attend(self) -> None:
        """Announces the version to readers that have connected since `publish`; for callers that do not wait here."""
        self._poll(0.0)

    def until_taken(self, version: int, readers: int, timeout_s: float) -> None:
        """Blocks until so many sinks have all of it; raises when one of them is gone, or too slow."""
        deadline = time.monotonic() + timeout_s
        while True:
            finished = sorted(peer for peer, taken in self._taken.items() if taken == version)
            if len(finished) >= readers:
                return
            lost = {peer: why for peer, why in self._lost.items() if peer not in finished}
            if lost:
                peer, why = next(iter(lost.items()))
                raise PeerLost(f"weights {version}: reader {peer} is gone: {why}")
            if time.monotonic() > deadline:
                late = sorted(self._readers - set(finished)) or ["no other has connected"]
                raise TransferError(
                    f"weights {version}: {len(finished)} of {readers} readers have them after {timeout_s:g} s",
                    hint=f"waiting for {', '.join(late)}",
                )
            self._poll(POLL_S)

    def close(self) -> None:
        self.end.close()

    def _poll(self, seconds: float) -> None:
        for event in self.end.events(seconds):
            match event:
                case PeerJoined(peer=peer):
                    self._readers.add(peer)
                    self._lost.pop(peer, None)
                    self._announce(peer)
                case Notification(peer=peer, payload=payload):
                    self._taken[peer] = msgspec.msgpack.decode(payload, type=WeightVersion).version
                case PeerGone(peer=peer, reason=reason):
                    self._readers.discard(peer)
                    self._lost[peer] = reason

    def _announce(self, peer: str) -> None:
        if self.version is not None:
            self.end.notify(peer, msgspec.msgpack.encode(WeightVersion(self.version)))


class WeightSink:
    """A rank that receives weights. After a `pull`, `memory` contains them in the layout `wanted`."""

    def __init__(
        self,
        end: Transport,
        wanted: PackedWeightShards,
        held: Sequence[PackedWeightShards],
        addresses: Sequence[str],
        timeout_s: float = 60.0,
    ) -> None:
        """`held`: what every source holds, by rank, as they do themselves; `addresses` of the same ranks."""
        if len(held) != len(addresses):
            raise TransferError(f"{len(held)} layouts of sources for {len(addresses)} addresses")
        self.end, self.wanted, self.bytes_read = end, wanted, 0
        self.memory = end.allocate(REGION, max(wanted.nbytes, 1))
        end.listen()
        plan = make_plan([shard for one in held for shard in one.shards], wanted.shards)
        ranks = {one.shards[0].rank: place for place, one in enumerate(held) if one.shards}
        self._legs: dict[str, list[Leg]] = {}  # by the name of the peer
        self._published: dict[str, int] = {}
        self._greeted: dict[str, bytes] = {}
        self._tickets: set[int] = set()
        self._names: dict[str, int] = {}  # every source, also those that have nothing for this rank
        for place, address in enumerate(addresses):
            self._names[end.connect(address)] = place
        self._until(
            lambda: len(self._greeted) == len(self._names), timeout_s, "be greeted by", self._silent
        )
        for peer, place in self._names.items():
            self._check(peer, place, held[place])
        for leg in plan.legs:
            peer = next(
                name for name, place in self._names.items() if place == ranks[leg.source_rank]
            )
            self._legs.setdefault(peer, []).append(leg)

    def pull(self, version: int, timeout_s: float) -> None:
        """Waits until every source has published it, reads, and says so to all of them."""
        self._until(
            lambda: all(self._published.get(peer) == version for peer in self._names),
            timeout_s,
            f"see weights {version} of",
            lambda: [p for p in self._names if self._published.get(p) != version],
        )
        for peer, legs in self._legs.items():
            for leg in legs:
                ticket = self.end.read(peer, leg.source_region, leg.target_region, leg.runs)
                self._tickets.add(ticket)
                self.bytes_read += int(leg.runs.sizes.sum())
        self._until(
            lambda: not self._tickets, timeout_s, f"read weights {version} from", lambda: self._legs
        )
        for peer in self._names:
            self.end.notify(peer, msgspec.msgpack.encode(WeightVersion(version)))

    def close(self) -> None:
        self.end.close()

    def _silent(self) -> list[str]:
        return [peer for peer in self._names if peer not in self._greeted]

    def _check(self, peer: str, place: int, held: PackedWeightShards) -> None:
        ours = cut_of_rank(held)
        try:
            theirs = msgspec.msgpack.decode(self._greeted[peer], type=SourceLayout)
        except msgspec.MsgspecError:
            raise TransferRefused(
                f"{peer} is no source of weights", hint="is its address right?"
            ) from None
        if theirs.fingerprint != ours.fingerprint:
            raise TransferRefused(
                f"source {place} ({peer}) has another layout: expected {ours.words}, it has {theirs.words}",
                hint="both sides need the same model, ranks and number type: "
                "--dtype of the server, precision.kind of the trainer",
            )

    def _until(
        self,
        done: Callable[[], bool],
        timeout_s: float,
        what: str,
        waiting: Callable[[], Iterable[str]],
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                names = ", ".join(f"source {self._names[peer]} ({peer})" for peer in waiting())
                raise TransferError(f"did not {what} {names} within {timeout_s:g} s")
            for event in self.end.events(POLL_S):
                self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case PeerJoined(peer=peer, greeting=greeting):
                self._greeted[peer] = greeting
            case Notification(peer=peer, payload=payload):
                self._published[peer] = msgspec.msgpack.decode(payload, type=WeightVersion).version
            case TransferDone(ticket=ticket):
                self._tickets.discard(ticket)
            case TransferFailed(peer=peer, reason=reason):
                raise TransferError(f"source {self._names.get(peer, '?')} ({peer}): {reason}")
            case PeerGone(peer=peer, reason=reason):
                raise PeerLost(f"source {self._names.get(peer, '?')} ({peer}) is gone: {reason}")
