"""An allocator that keeps what the device gave it."""

from dataclasses import dataclass

GRAIN = 512


@dataclass
class Block:
    begin: int
    length: int
    segment: int  # number of the segment that it lies in
    free: bool = True


class Allocator:
    def __init__(self, device_bytes: int) -> None:
        self.device_bytes = device_bytes
        self.reserved = 0  # what was asked from the device, in all
        self.segments = 0  # how often the device was asked
        self.blocks: list[Block] = []  # sorted by begin

    def allocate(self, size: int) -> int:
        """The address of `size` bytes; MemoryError when neither the cache nor the device has them."""
        # begin answer
        size = -(-max(size, 1) // GRAIN) * GRAIN
        fitting = [block for block in self.blocks if block.free and block.length >= size]
        best = min(fitting, key=lambda block: block.length, default=None)
        if best is None:
            best = self._ask_device(size)
        if best.length - size >= GRAIN:
            rest = Block(best.begin + size, best.length - size, best.segment)
            self.blocks.insert(self.blocks.index(best) + 1, rest)
            best.length = size
        best.free = False
        return best.begin
        # end answer

    def release(self, address: int) -> None:
        """Gives a block back to the cache and merges it with its free neighbours."""
        # begin answer
        found = next(one for one in self.blocks if one.begin == address and not one.free)
        found.free = True
        merged: list[Block] = []
        for other in self.blocks:
            one = merged[-1] if merged else None
            if one is None:
                merged.append(other)
                continue
            if one.free and other.free and one.segment == other.segment:
                one.length += other.length
            else:
                merged.append(other)
        self.blocks = merged
        # end answer

    def _ask_device(self, size: int) -> Block:
        """A new segment at the end of what is reserved."""
        if self.reserved + size > self.device_bytes:
            raise MemoryError(f"{size} bytes wanted, {self.device_bytes - self.reserved} left")
        block = Block(self.reserved, size, self.segments)
        self.reserved += size
        self.segments += 1
        self.blocks.append(block)
        return block
