"""Room for two copies of one rank's state, in memory that has no name.

    [step | copy ........ ][step | copy ........ ]     a step of -1: nothing whole lies there

It is a memfd: other processes of the machine are handed its descriptor and see the same pages, and it goes when the
last process goes, however that ends. Knows no sockets and not what the bytes mean.
"""

import contextlib
import mmap
import os
import threading

from cairn.train.checkpoint.peer_messages import Sums

SLOTS = 2


class Shard:
    """A copy begins with its step, which is -1 while it is written."""

    def __init__(self, size: int, world: int) -> None:
        self.world = world
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.descriptor = os.memfd_create("cairn-copies")
        os.ftruncate(self.descriptor, SLOTS * self.size)
        self.memory = mmap.mmap(self.descriptor, SLOTS * self.size)
        for slot in range(SLOTS):
            mark(self.memory, slot, self.size, -1)
        self.used = [0] * SLOTS
        self.sums = [Sums([0], [])] * SLOTS  # without sums: not summed yet
        self.filling = threading.Lock()

    def check(self, slot: int) -> int:
        return sum(self.sums[slot].sums) % 2**64

    def step(self, slot: int) -> int:
        return int.from_bytes(
            self.memory[slot * self.size : slot * self.size + 8], "little", signed=True
        )

    def steps(self) -> tuple[int, int]:
        return self.step(0), self.step(1)

    def older(self) -> int:
        return 0 if self.step(0) <= self.step(1) else 1

    def view(self, slot: int, length: int) -> memoryview:
        """Stays valid while it is referred to, also where the shard is closed meanwhile; ValueError afterwards."""
        return memoryview(self.memory)[slot * self.size : slot * self.size + length]

    def close(self) -> None:
        os.close(self.descriptor)
        self.descriptor = -1
        with contextlib.suppress(BufferError):  # a thread still sends from it; it goes with that
            self.memory.close()


def mark(memory: mmap.mmap, slot: int, size: int, step: int) -> None:
    memory[slot * size : slot * size + 8] = step.to_bytes(8, "little", signed=True)
