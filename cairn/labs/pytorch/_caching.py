"""The policy of torch's caching allocator for a device, as pure arithmetic over sizes: no memory is touched.

    request -> rounded to 512 bytes -> best fitting free block of its pool -> split, if enough is left over
                                    '-> none fits: a new segment from the driver (slow, and a synchronisation)

    small pool   up to 1 MiB        segments of 2 MiB
    large pool   up to 10 MiB       segments of 20 MiB;      beyond: the size, rounded to 2 MiB

Freed blocks join free neighbours of their segment and are kept. Streams and garbage collection are left out.
"""

from dataclasses import dataclass, field

UNIT = 512
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE, LARGE_SEGMENT = 10 << 20, 20 << 20
ROUND_LARGE = 2 << 20


@dataclass
class Block:
    segment: int
    start: int
    size: int
    free: bool = False


@dataclass
class CachingAllocator:
    """`allocate` gives a ticket; `free` takes it back."""

    allocated: int = 0  # bytes in blocks that are in use
    reserved: int = 0  # bytes that the driver gave
    segments: int = 0  # how often the driver was asked
    peak_allocated: int = 0
    _blocks: list[Block] = field(default_factory=list)
    _small_segments: set[int] = field(default_factory=set)

    def allocate(self, size: int) -> Block:
        rounded = round_up(size, UNIT)
        block = self._best_fit(rounded) or self._grow(rounded)
        self._split(block, rounded)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        block.free = True
        for other in [
            b for b in self._blocks if b.free and b.segment == block.segment and b is not block
        ]:
            if other.start + other.size == block.start or block.start + block.size == other.start:
                block.start = min(block.start, other.start)
                block.size += other.size
                self._blocks.remove(other)

    def _best_fit(self, size: int) -> Block | None:
        small = size <= SMALL
        fitting = [b for b in self._blocks if b.free and b.size >= size and self._small(b) == small]
        return min(
            fitting, key=lambda block: (block.size, block.segment, block.start), default=None
        )

    def _small(self, block: Block) -> bool:
        return block.segment in self._small_segments

    def _grow(self, size: int) -> Block:
        segment_bytes = segment_size(size)
        if size <= SMALL:
            self._small_segments.add(self.segments)
        block = Block(self.segments, 0, segment_bytes, free=True)
        self.segments += 1
        self.reserved += segment_bytes
        self._blocks.append(block)
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        worth_it = rest >= UNIT if self._small(block) else rest > SMALL
        if worth_it:
            self._blocks.append(Block(block.segment, block.start + size, rest, free=True))
            block.size = size


def segment_size(size: int) -> int:
    """What the driver is asked for when no block fits."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE else round_up(size, ROUND_LARGE)


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
