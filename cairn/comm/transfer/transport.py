"""Transport interface: memory regions, reads, writes, notifications, and events for lost peers.

    here                                     there
    register("kv", memory)                   register("kv", memory)
    listen() -> address           <------    connect(address) -> peer
    read(peer, ..)  runs of their region into ours        write(peer, ..)  runs of ours into theirs
    notify(peer, bytes)                      events(): Joined, Note, Done, Failed, Lost

Reads and writes are one-sided: the owner of the memory does nothing. Each has a ticket, and each ticket ends in one
Done or one Failed; after Lost(peer) nothing of that peer's lands here any more. `tcp`, `shm`, `nixl` and `inprocess`
carry it out. Who may read what, and until when, is not known here (see `lease`).
"""

from typing import NamedTuple, Protocol

import numpy as np

from cairn.comm.transfer.byte_runs import ByteRuns, Offsets
from cairn.comm.transfer.copies import Bytes
from cairn.comm.transfer.errors import TransferError


class PeerJoined(NamedTuple):
    """A connection is made, by them or by us."""

    peer: str
    greeting: bytes  # what the other side says about itself; see `handshake`


class Notification(NamedTuple):
    peer: str
    payload: bytes


class TransferDone(NamedTuple):
    peer: str
    ticket: int


class TransferFailed(NamedTuple):
    peer: str
    ticket: int
    reason: str


class PeerGone(NamedTuple):
    peer: str
    reason: str
    dead: bool = False  # it has closed or died; otherwise it may live, and only we have given it up


Event = PeerJoined | Notification | TransferDone | TransferFailed | PeerGone


class MemoryRegion(NamedTuple):
    """Memory that peers may reach. `memory` is None on a GPU, where only the address counts."""

    name: str
    nbytes: int
    address: int
    memory: Bytes | None = None
    device: int = -1  # of the GPU; -1: host memory


class Transport(Protocol):
    name: str  # how peers know this end: unique among them

    @property
    def kind(self) -> str: ...

    def allocate(self, region: str, nbytes: int) -> Bytes:
        """Memory that this transport reaches best, registered."""
        ...

    def register(self, region: str, memory: Bytes) -> None: ...

    def listen(self, greeting: bytes = b"") -> str:
        """Accept connections and return the address. Regions cannot be added afterwards."""
        ...

    def connect(self, address: str) -> str:
        """The peer's name. Raises TransferError when there is no answer."""
        ...

    def read(self, peer: str, source_region: str, target_region: str, runs: ByteRuns) -> int:
        """Their region into ours; the ticket."""
        ...

    def write(self, peer: str, source_region: str, target_region: str, runs: ByteRuns) -> int:
        """Ours into theirs; the ticket. Done means that the bytes are there."""
        ...

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a notification, in order with others. It is dropped silently if the peer is lost."""
        ...

    def events(self, timeout_s: float = 0.0) -> list[Event]:
        """Return the events since the last call; wait for the first one up to `timeout_s`."""
        ...

    def drop(self, peer: str) -> None:
        """Cut the connection: afterwards nothing of theirs lands here. A Lost event follows."""
        ...

    def close(self) -> None: ...


def host_region(name: str, memory: Bytes) -> MemoryRegion:
    """A region of an array; refuses what has no plain bytes."""
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise TransferError(
            f"region {name!r} is {memory.dtype} of shape {memory.shape}",
            hint="register a one-dimensional, contiguous array of bytes: x.view(np.uint8).ravel()",
        )
    return MemoryRegion(name, memory.nbytes, memory.ctypes.data, memory)


def check_reach(region: str, nbytes: int, starts: Offsets, sizes: Offsets) -> str | None:
    """Why these ranges are not all inside a region, or None."""
    if len(starts) != len(sizes):
        return f"{len(starts)} offsets and {len(sizes)} sizes"
    if not len(starts):
        return None
    if int(starts.min()) < 0 or int(sizes.min()) < 0:
        return f"a negative offset or size in region {region!r}"
    if int(sizes.max()) > nbytes or int(starts.max()) > nbytes:  # and so no sum can overflow
        return f"byte {max(int(starts.max()), int(sizes.max())):,} of region {region!r}, which has {nbytes:,}"
    end = int((starts + sizes).max())
    return f"byte {end:,} of region {region!r}, which has {nbytes:,}" if end > nbytes else None
