"""The memory that the ranks of one host share.

    | state of each rank | the reason, when the group is stopped    | rings of every ordered pair |
    ring = | items | room | header of each place | places |

It is an anonymous file (memfd) that the first rank of the host makes and the others open through
/proc: it has no name, so nothing can be left behind, however a process ends; the kernel frees it with
the last process. Knows where things lie; `shared_link` knows how they are used.
"""

import ctypes
import itertools
import mmap
import os
import struct
from typing import NamedTuple

import torch

from cairn.labs.torch_backend.semaphore import SEMAPHORE_BYTES, Semaphore

LINE = 64
REASON_BYTES = 2048
_STATE = struct.Struct("<QQB?")  # entered, done, operation, has left


class State(NamedTuple):
    entered: int = 0  # number of the last operation it began
    done: int = 0  # number of the last it finished
    operation: int = 0  # of wire.OPERATIONS
    left: bool = False


class Ring(NamedTuple):
    """The connection from one rank to another, one direction."""

    items: Semaphore  # places with something in them
    room: Semaphore  # places that are free
    headers: list[memoryview]
    places: list[torch.Tensor]  # of bytes


class Segment:
    """`ranks` of one host; `purposes` rings for each ordered pair, which do not disturb each other."""

    def __init__(self, ranks: int, piece: int, places: int, purposes: int, fd: int) -> None:
        self.ranks, self.piece, self.places, self.purposes = ranks, piece, places, purposes
        self._ring_bytes = 2 * SEMAPHORE_BYTES + places * (LINE + piece)
        self.bytes = self._first_ring() + ranks * ranks * purposes * self._ring_bytes
        if os.fstat(fd).st_size == 0:
            os.ftruncate(fd, self.bytes)
        self._map = mmap.mmap(fd, self.bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._memory = memoryview(self._map)
        self._may_stop = self._semaphore(ranks * LINE)
        self._stopped = self._semaphore(ranks * LINE + SEMAPHORE_BYTES)

    @staticmethod
    def make_file() -> int:
        return os.memfd_create("cairn-comm")

    @staticmethod
    def open_file(pid: int, fd: int) -> int:
        return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)

    def create(self) -> None:
        """Initialise the semaphores; called once by the rank that made the file, before the others open it."""
        self._may_stop.create(1)
        self._stopped.create(0)
        for source, target in itertools.permutations(range(self.ranks), 2):
            for purpose in range(self.purposes):
                ring = self.ring(source, target, purpose)
                ring.items.create(0)
                ring.room.create(self.places)

    def ring(self, source: int, target: int, purpose: int) -> Ring:
        """The ring from one local rank to another."""
        number = (source * self.ranks + target) * self.purposes + purpose
        base = self._first_ring() + number * self._ring_bytes
        headers = base + 2 * SEMAPHORE_BYTES
        first = headers + self.places * LINE
        return Ring(
            self._semaphore(base),
            self._semaphore(base + SEMAPHORE_BYTES),
            [
                self._memory[headers + k * LINE : headers + (k + 1) * LINE]
                for k in range(self.places)
            ],
            [
                self._bytes[first + k * self.piece : first + (k + 1) * self.piece]
                for k in range(self.places)
            ],
        )

    def write_state(
        self, rank: int, entered: int, done: int, operation: int = 0, left: bool = False
    ) -> None:
        """The fields of `State`; twice for each operation, so no object is made."""
        _STATE.pack_into(self._memory, rank * LINE, entered, done, operation, left)

    def state(self, rank: int) -> State:
        """A glance for messages to people; it may be a moment old."""
        return State(*_STATE.unpack_from(self._memory, rank * LINE))

    def stop(self, reason: str) -> None:
        """Tells every rank of the host; the first reason stays."""
        if not self._may_stop.try_wait():
            return
        text = reason.encode()[: REASON_BYTES - 4]
        at = self._reason_at()
        self._memory[at : at + 4] = len(text).to_bytes(4, "little")
        self._memory[at + 4 : at + 4 + len(text)] = text
        self._stopped.post()

    def stopped(self) -> str | None:
        """The reason, if the group was stopped."""
        if not self._stopped.try_wait():
            return None
        self._stopped.post()  # for the next who looks
        at = self._reason_at()
        count = int.from_bytes(self._memory[at : at + 4], "little")
        return bytes(self._memory[at + 4 : at + 4 + count]).decode(errors="replace")

    def _semaphore(self, offset: int) -> Semaphore:
        return Semaphore(self._address + offset)

    def _reason_at(self) -> int:
        return self.ranks * LINE + 2 * SEMAPHORE_BYTES

    def _first_ring(self) -> int:
        return self.ranks * LINE + 2 * SEMAPHORE_BYTES + REASON_BYTES
