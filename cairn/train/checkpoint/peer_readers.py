"""Bytes of a copy into the tensors, by several threads at once: from another node over TCP, or from this one's memory.

    wanted   |  embedding  | layer 0 | layer 1 | layer 2 | ...
    lane 0   |<- embedding ->|                               one request, then all its bytes, without a pause
    lane 1   |<- layer 0 ->|<- layer 1 ->|<- layer 2 ->|

One connection is one core's copying at each end; several keep several cores busy. Numpy sums and copies, because torch
would start threads of its own below each lane. Knows neither tensors nor what a step means.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from cairn.core.events import span
from cairn.core.shared_secret import Secret
from cairn.train.checkpoint.memory_checksums import word_sum
from cairn.train.checkpoint.peer_link import Gone, Link, connect, reason
from cairn.train.checkpoint.peer_messages import Done, Fetch, Parts
from cairn.train.checkpoint.peer_messages import Sums as SumsOfParts

MOST_LANES = 4
LEAST_BYTES = 1 << 20  # for less a lane of its own is not worth its thread
STEP = 8  # bytes
BLOCK = 1 << 20  # of what lies on this machine: less than a core's own cache
ANSWER_S = 30.0
Sums = dict[int, int]  # where a stretch begins -> sum of its 64-bit words


class PieceRead(NamedTuple):
    """A stretch of a copy, and where it goes."""

    at: int  # bytes from the copy's beginning
    room: memoryview


class Remote:
    """Connections to the memory that holds a copy; opened when the first byte is wanted."""

    in_place = False  # bytes have to be brought before they can be looked at

    def __init__(
        self, address: str, generation: int, rank: int, step: int, secret: Secret | None = None
    ) -> None:
        self.address, self.which, self.secret = address, (generation, rank, step), secret
        self.links: list[Link] = []  # by lane

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.links = []

    def _connect(self, lanes: int) -> None:
        """All before the first byte: a lane that runs leaves others no time to connect."""
        while len(self.links) < lanes:
            self.links.append(connect(self.address, ANSWER_S, self.secret))

    def parts(self) -> Sums:
        """The checksums of the copy's parts, by where they begin."""
        self._connect(1)
        answer = self.links[0].ask(Parts(*self.which))
        if not isinstance(answer, SumsOfParts):
            raise Gone(reason(answer))
        return dict(zip(answer.cuts, answer.sums, strict=True))

    def read(self, pieces: Sequence[PieceRead]) -> Sums:
        """Fills every room; the sums of what came."""
        loads = shared_out(pieces, most_lanes())
        self._connect(len(loads))
        return together(loads, self._lane)

    def look(self, at: int, size: int) -> memoryview:
        """A stretch by itself."""
        room: Any = np.empty(size, np.uint8)
        if size:
            self.read([PieceRead(at, memoryview(room))])
        return memoryview(room)

    def _lane(self, lane: int, load: list[PieceRead]) -> Sums:
        link = self.links[lane]
        link.send(Fetch(*self.which, [(one.at, len(one.room)) for one in load]))
        answer, size = link.receive()
        if not isinstance(answer, Done) or not answer.fine:
            raise Gone(reason(answer))
        if size != sum(len(one.room) for one in load):
            raise Gone(f"{size:,} bytes came, others were wanted")
        with span("copy received", bytes=size):
            link.receive_into([one.room for one in load])
        with span("copy summed"):
            return {one.at: word_sum(one.room) for one in load}


class Mapped:
    """A copy in memory of this machine that both processes see; `step` stands at its beginning while it is whole."""

    in_place = True

    def __init__(self, memory: Any, step: int, parts: Sums) -> None:
        self.memory, self.step, self.known = memoryview(memory), step, parts

    def close(self) -> None:
        """The memory goes with the last tensor in it."""

    def parts(self) -> Sums:
        return self.known

    def read(self, pieces: Sequence[PieceRead]) -> Sums:
        """A writer marks the copy before it begins: if the mark is still there, what was summed is what was copied."""
        sums = together(shared_out(pieces, most_lanes()), self._lane)
        if int.from_bytes(self.look(0, STEP), "little", signed=True) != self.step:
            raise Gone("it was overwritten")
        return sums

    def look(self, at: int, size: int) -> memoryview:
        return self.memory[at : at + size]

    def _lane(self, lane: int, load: list[PieceRead]) -> Sums:
        """Summed and copied block by block: the second reading finds it in the cache."""
        sums = {}
        with span("copy received", bytes=sum(len(one.room) for one in load)):
            for one in load:
                total = 0
                for at in range(0, len(one.room), BLOCK):
                    room = one.room[at : at + BLOCK]
                    there = self.look(one.at + at, len(room))
                    total += word_sum(there)
                    np.copyto(np.frombuffer(room, np.uint8), np.frombuffer(there, np.uint8))
                sums[one.at] = total % 2**64
        return sums


def most_lanes() -> int:
    return min(MOST_LANES, os.cpu_count() or 1)


def together(loads: list[list[PieceRead]], carry: Callable[[int, list[PieceRead]], Sums]) -> Sums:
    """Each load in a thread of its own; all sums."""
    if len(loads) == 1:
        return carry(0, loads[0])
    with ThreadPoolExecutor(len(loads)) as threads:
        carried = list(threads.map(carry, range(len(loads)), loads))
    return {at: value for sums in carried for at, value in sums.items()}


def shared_out(pieces: Sequence[PieceRead], most: int) -> list[list[PieceRead]]:
    """The largest stretch first, each to the lane that has the fewest bytes so far."""
    total = sum(len(one.room) for one in pieces)
    lanes = max(1, min(most, len(pieces), total // LEAST_BYTES))
    loads: list[list[PieceRead]] = [[] for _ in range(lanes)]
    sizes = [0] * lanes
    for one in sorted(pieces, key=lambda one: len(one.room), reverse=True):
        lane = sizes.index(min(sizes))
        loads[lane].append(one)
        sizes[lane] += len(one.room)
    return loads
