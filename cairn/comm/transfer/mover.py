"""Interface between an endpoint and the mover that transfers its bytes.

A mover reads from a peer's memory and writes to it; the endpoint does the rest (connections, notes, signs of life).
`tcp`, `shm` and `nixl` are movers. Types only.
"""

import socket
import time
from typing import NamedTuple, Protocol

import msgspec

from cairn.comm.transfer.byte_runs import ByteRuns
from cairn.comm.transfer.copies import Bytes
from cairn.comm.transfer.transport import MemoryRegion
from cairn.comm.transfer.wire import Frame, Wire

HELLO, NOTE, BEAT, BYE, OWN = 0, 1, 2, 3, 16  # a mover's frames begin with OWN


class Patience(NamedTuple):
    """Heartbeat interval and the timeout after which a silent peer is lost.

    The socket of a killed process closes at once; silence means a frozen process, a lost machine or a broken cable. A
    timeout that is too short mistakes a busy machine for a lost one.
    """

    beat_s: float = 0.2
    silence_s: float = 2.0


PATIENCE = Patience()


class EndpointHello(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: str
    regions: dict[str, int]  # bytes of each
    mover: bytes
    greeting: bytes


class TransferPeer:
    """A connection to another endpoint."""

    def __init__(self, wire: Wire, hello: EndpointHello) -> None:
        self.wire, self.name, self.regions = wire, hello.name, hello.regions
        self.tickets: set[int] = set()  # under way
        self.reason: str | None = None  # why it was cut, if we did it
        self.last_received = (0, time.monotonic())  # bytes, and since when no more have come


class End(Protocol):
    """Interface of the endpoint that a mover uses."""

    regions: dict[str, MemoryRegion]

    def settle(self, peer: TransferPeer, ticket: int, reason: str | None = None) -> None: ...


class Mover(Protocol):
    kind: str
    family: socket.AddressFamily

    def allocate(self, nbytes: int) -> Bytes: ...
    def open(self, end: End) -> bytes:
        """Regions are complete; what a peer has to know about them."""
        ...

    def greet(self, connection: socket.socket) -> None:
        """Send what no frame can carry, while nothing else is on the socket."""
        ...

    def admit(self, peer: TransferPeer, about: bytes, connection: socket.socket) -> None: ...
    def frame(self, peer: TransferPeer, frame: Frame) -> None:
        """A frame of kind OWN or above; takes its payload off the wire."""
        ...

    def read(
        self, peer: TransferPeer, ticket: int, source: str, target: MemoryRegion, runs: ByteRuns
    ) -> None: ...
    def write(
        self, peer: TransferPeer, ticket: int, source: MemoryRegion, target: str, runs: ByteRuns
    ) -> None: ...
    def forget(self, peer: TransferPeer) -> None:
        """Afterwards nothing of this peer's lands in our memory."""
        ...

    def close(self) -> None: ...
