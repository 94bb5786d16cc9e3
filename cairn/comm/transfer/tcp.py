"""Bytes in frames over TCP: works everywhere, and is what the others are measured against.

    READ   region, offsets, sizes  ------>   the owner's reader thread checks them and queues
    DATA   the bytes               <------   DATA, sent from where they lie
    WRITE  region, offsets, sizes, bytes ->  received to where they belong, then
    WROTE                          <------

An owner checks every range that it is asked for: a peer cannot reach beyond a region. Memory has to be the host's; a
GPU's pages are staged by their owner, or go through NIXL.
"""

import socket
import threading

import msgspec
import numpy as np

from cairn.comm.transfer.byte_runs import ByteRuns, Offsets
from cairn.comm.transfer.copies import Bytes
from cairn.comm.transfer.endpoint import TransferEndpoint
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.mover import OWN, PATIENCE, End, Patience, TransferPeer
from cairn.comm.transfer.transport import MemoryRegion, check_reach
from cairn.comm.transfer.wire import ConnectionGone, Frame, Scattered
from cairn.core.shared_secret import Secret

READ, DATA, WRITE, WROTE, REFUSED = range(OWN, OWN + 5)


class Ranges(msgspec.Struct, frozen=True, array_like=True):
    region: str
    starts: bytes  # int64, little endian
    sizes: bytes

    @staticmethod
    def encode(region: str, starts: Offsets, sizes: Offsets) -> bytes:
        columns = (np.ascontiguousarray(column, "<i8").tobytes() for column in (starts, sizes))
        return msgspec.msgpack.encode(Ranges(region, *columns))

    def columns(self) -> tuple[Offsets, Offsets]:
        return np.frombuffer(self.starts, "<i8"), np.frombuffer(self.sizes, "<i8")


class TcpMover:
    kind = "tcp"
    family = socket.AF_INET

    def __init__(self) -> None:
        self._expected: dict[int, Scattered] = {}  # where the bytes of a ticket belong
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Bytes:
        return np.zeros(nbytes, np.uint8)

    def open(self, end: End) -> bytes:
        self._end = end
        on_gpu = [region.name for region in end.regions.values() if region.memory is None]
        if on_gpu:
            raise TransferError(
                f"region {on_gpu[0]!r} is a GPU's, and TCP sends from host memory",
                hint="stage it in host memory, or use NIXL",
            )
        return b""

    def greet(self, connection: socket.socket) -> None:
        pass

    def admit(self, peer: TransferPeer, about: bytes, connection: socket.socket) -> None:
        pass

    def read(
        self, peer: TransferPeer, ticket: int, source: str, target: MemoryRegion, runs: ByteRuns
    ) -> None:
        with self._lock:
            self._expected[ticket] = _scattered(target, runs.target, runs.sizes)
        peer.wire.send(Frame(READ, ticket, Ranges.encode(source, runs.source, runs.sizes)))

    def write(
        self, peer: TransferPeer, ticket: int, source: MemoryRegion, target: str, runs: ByteRuns
    ) -> None:
        frame = Frame(WRITE, ticket, Ranges.encode(target, runs.target, runs.sizes))
        peer.wire.send(frame, _scattered(source, runs.source, runs.sizes))

    def frame(self, peer: TransferPeer, frame: Frame) -> None:
        if frame.kind == READ:
            self._answer(peer, frame)
        elif frame.kind == DATA:
            self._take(peer, frame)
        elif frame.kind == WRITE:
            self._store(peer, frame)
        elif frame.kind in (WROTE, REFUSED):
            with self._lock:
                self._expected.pop(frame.ticket, None)
            self._end.settle(peer, frame.ticket, frame.meta.decode() or None)
        else:
            raise ConnectionGone(f"it sends frames of kind {frame.kind}")

    def forget(self, peer: TransferPeer) -> None:
        """Called by the thread that would have received: nothing lands any more."""
        with self._lock:
            for ticket in peer.tickets:
                self._expected.pop(ticket, None)

    def close(self) -> None:
        pass

    def _answer(self, peer: TransferPeer, frame: Frame) -> None:
        source = self._asked(peer, frame)
        if source is not None:
            peer.wire.send(Frame(DATA, frame.ticket, b""), source)

    def _take(self, peer: TransferPeer, frame: Frame) -> None:
        with self._lock:
            place = self._expected.pop(frame.ticket, None)
        if place is None or place.nbytes != frame.payload:
            raise ConnectionGone(f"it sends {frame.payload:,} bytes that were not asked for")
        peer.wire.receive_into(place)
        self._end.settle(peer, frame.ticket)

    def _store(self, peer: TransferPeer, frame: Frame) -> None:
        target = self._asked(peer, frame)
        if target is None:
            peer.wire.skip(frame.payload)
            return
        if target.nbytes != frame.payload:
            raise ConnectionGone(
                f"it announces {target.nbytes:,} bytes and sends {frame.payload:,}"
            )
        peer.wire.receive_into(target)
        peer.wire.send(Frame(WROTE, frame.ticket, b""))

    def _asked(self, peer: TransferPeer, frame: Frame) -> Scattered | None:
        """The ranges of our memory that a frame names; None after a refusal."""
        try:
            ranges = msgspec.msgpack.decode(frame.meta, type=Ranges)
            starts, sizes = ranges.columns()
        except (msgspec.MsgspecError, ValueError):
            raise ConnectionGone("it sends what is not of this protocol") from None
        region = self._end.regions.get(ranges.region)
        problem = f"there is no region {ranges.region!r}"
        if region is not None:
            problem = check_reach(region.name, region.nbytes, starts, sizes)
        if region is None or problem is not None:
            peer.wire.send(Frame(REFUSED, frame.ticket, f"refused: {problem}".encode()))
            return None
        return _scattered(region, starts, sizes)


def _scattered(region: MemoryRegion, starts: Offsets, sizes: Offsets) -> Scattered:
    assert region.memory is not None  # `open` has refused a GPU's
    return Scattered(region.memory, starts, sizes)


def tcp(
    name: str,
    host: str = "127.0.0.1",
    port: int = 0,
    patience: Patience = PATIENCE,
    secret: Secret | None = None,
) -> TransferEndpoint:
    return TransferEndpoint(name, TcpMover(), host, port, patience, secret)
