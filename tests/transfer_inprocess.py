"""A network inside one process, on a clock of its own, that loses, delays, doubles and reorders what it is told to.

    fabric = Fabric(Faults(drop=0.1, delay_s=(0, 0.2), duplicate=0.1), seed=7)
    p, d = fabric.end("p"), fabric.end("d")
    fabric.advance(0.5)         what is due arrives, in the order in which it is due
    fabric.kill("d")            its peers hear of it, nothing of its own lands any more
    fabric.freeze("d")          it is silent, and nobody is told
    fabric.suspect("p", "d")    p gives d up, which lives, and finds out later

Reads are one-sided: a frozen owner, or one that has given us up, is still read. A read copies at the moment it arrives,
so bytes of a page that was given away meanwhile are the wrong ones: tests see it. Deterministic for a seed; the same
interface as the real transports.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cairn.comm.transfer.byte_runs import ByteRuns
from cairn.comm.transfer.copies import Bytes, copy_runs
from cairn.comm.transfer.errors import PeerLost, TransferError
from cairn.comm.transfer.transport import (
    Event,
    MemoryRegion,
    Notification,
    PeerGone,
    PeerJoined,
    TransferDone,
    TransferFailed,
    check_reach,
    host_region,
)


class Faults(NamedTuple):
    drop: float = 0.0  # chance that a message, or a whole read, never arrives
    duplicate: float = 0.0  # chance that it arrives twice
    # Evenly between these, each message by itself: their order is not kept.
    delay_s: tuple[float, float] = (0.0, 0.0)
    seen_s: float = 0.0  # how long after a death its peers hear of it


class Fabric:
    def __init__(self, faults: Faults = Faults(), seed: int = 0) -> None:  # noqa: B008
        self.faults, self.now = faults, 0.0
        self.ends: dict[str, InProcess] = {}
        self.frozen: set[str] = set()
        self._random = random.Random(seed)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def end(self, name: str) -> "InProcess":
        self.ends[name] = InProcess(self, name)
        return self.ends[name]

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._number), act))

    def carry(self, act: Callable[[], None]) -> None:
        """Deliver something, as far as the faults let it."""
        if self._random.random() < self.faults.drop:
            return
        for _ in range(1 + (self._random.random() < self.faults.duplicate)):
            self.later(self._random.uniform(*self.faults.delay_s), act)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, _, act = heapq.heappop(self._due)
            act()
        self.now = end

    def kill(self, name: str) -> None:
        dead = self.ends.pop(name, None)
        if dead is not None:
            for peer in sorted(self.ends):
                self._part(peer, name, "killed", dead=True)
            dead.peers.clear()

    def freeze(self, name: str) -> None:
        self.frozen.add(name)

    def thaw(self, name: str) -> None:
        self.frozen.discard(name)

    def suspect(self, one: str, other: str, after_s: float = 1.0) -> None:
        """`one` cuts the connection; `other` goes on reading until it hears of it."""
        self._part(one, other, "silent", dead=False)
        self.later(after_s, lambda: self._part(other, one, "it closed the connection", dead=True))

    def reads(self, one: str, other: str) -> bool:
        """Whether a read or write of `one` reaches the memory of `other`."""
        alive = one in self.ends and other in self.ends
        return alive and other in self.ends[one].peers and one not in self.frozen

    def talks(self, one: str, other: str) -> bool:
        return self.reads(one, other) and self.reads(other, one)

    def _part(self, one: str, gone: str, reason: str, dead: bool) -> None:
        end = self.ends.get(one)
        if end is not None and gone in end.peers:
            end.peers.discard(gone)  # from here on nothing of it lands
            self.later(self.faults.seen_s, lambda: end.parted(gone, reason, dead))


class InProcess:
    kind = "inprocess"

    def __init__(self, fabric: Fabric, name: str) -> None:
        self.fabric, self.name = fabric, name
        self.peers: set[str] = set()
        self.regions: dict[str, MemoryRegion] = {}
        self._greeting = b""
        self._events: list[Event] = []
        self._tickets: dict[int, str] = {}  # under way -> peer
        self._number = itertools.count(1)

    def allocate(self, region: str, nbytes: int) -> Bytes:
        memory = np.zeros(nbytes, np.uint8)
        self.register(region, memory)
        return memory

    def register(self, region: str, memory: Bytes) -> None:
        self.regions[region] = host_region(region, memory)

    def listen(self, greeting: bytes = b"") -> str:
        self._greeting = greeting
        return f"{self.kind}:{self.name}"

    def connect(self, address: str) -> str:
        name = address.removeprefix(f"{self.kind}:")
        other = self.fabric.ends.get(name)
        if other is None or name in self.fabric.frozen:
            raise TransferError(f"no connection to {address}", hint="is the other side up?")
        for one, peer in ((self, other), (other, self)):
            one.peers.add(peer.name)
            one._events.append(PeerJoined(peer.name, peer._greeting))
        return name

    def read(self, peer: str, source_region: str, target_region: str, runs: ByteRuns) -> int:
        return self._move(peer, (peer, source_region), (self.name, target_region), runs)

    def write(self, peer: str, source_region: str, target_region: str, runs: ByteRuns) -> int:
        return self._move(peer, (self.name, source_region), (peer, target_region), runs)

    def notify(self, peer: str, payload: bytes) -> None:
        def arrive() -> None:
            if self.fabric.talks(self.name, peer):
                self.fabric.ends[peer]._events.append(Notification(self.name, payload))

        if peer in self.peers:
            self.fabric.carry(arrive)

    def events(self, timeout_s: float = 0.0) -> list[Event]:
        found, self._events = self._events, []
        return found

    def drop(self, peer: str) -> None:
        self.fabric.suspect(self.name, peer, after_s=0.0)

    def close(self) -> None:
        self.fabric.kill(self.name)

    def parted(self, peer: str, reason: str, dead: bool) -> None:
        for ticket in [ticket for ticket, whose in self._tickets.items() if whose == peer]:
            del self._tickets[ticket]
            self._events.append(TransferFailed(peer, ticket, f"{peer} is lost: {reason}"))
        self._events.append(PeerGone(peer, reason, dead))

    def _move(
        self, peer: str, source: tuple[str, str], target: tuple[str, str], runs: ByteRuns
    ) -> int:
        if peer not in self.peers:
            raise PeerLost(f"{peer!r} is not connected", hint="connect again")
        ticket = next(self._number)
        self._tickets[ticket] = peer

        def arrive() -> None:
            # A second time it does nothing: after its one end nothing of a ticket lands.
            if ticket in self._tickets and self.fabric.reads(self.name, peer):
                del self._tickets[ticket]
                failure = self._copy(source, target, runs)
                ended = (
                    TransferFailed(peer, ticket, failure) if failure else TransferDone(peer, ticket)
                )
                self._events.append(ended)

        self.fabric.carry(arrive)
        return ticket

    def _copy(self, source: tuple[str, str], target: tuple[str, str], runs: ByteRuns) -> str | None:
        sides = []
        for (end, name), starts in ((source, runs.source), (target, runs.target)):
            region = self.fabric.ends[end].regions.get(name)
            if region is None or region.memory is None:
                return f"refused: there is no region {name!r}"
            problem = check_reach(name, region.nbytes, starts, runs.sizes)
            if problem is not None:
                return f"refused: {problem}"
            sides.append(region.memory)
        copy_runs(sides[0], sides[1], runs)
        return None
