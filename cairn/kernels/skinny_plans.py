"""How is a product of few rows laid over the chip? Sizes in, a launch plan out; nothing here runs a kernel.

Reasons behind the defaults, for an H200: 132 multiprocessors need about 4 MB of weights on their way at any time;
every program reads all of x, which comes from the L2 cache at little more than the rate of the memory, so a tile of w
should be at least twice as tall as x has rows; and every slab costs M*N float32 written and read again.
"""

from typing import NamedTuple

PROGRAMS = 128  # a product of fewer programs leaves multiprocessors idle
SHORTEST_SLAB = 256
STAGE_BYTES = 1 << 14  # of weights in one stage of a program's queue
ROWS_LIMIT = 8  # rows of x that the kernel without tensor cores takes


class Plan(NamedTuple):
    kernel: str = "tiles"  # or "rows"
    block_n: int = 64
    block_k: int = 128
    split: int = 1  # slabs of K
    warps: int = 4
    stages: int = 4
    overlap: bool = True  # start before the predecessor has ended
    prefetch: int = (
        1 << 15
    )  # bytes of weights that a program then asks into the L2 cache: all programs' must fit

    def slab(self, k: int) -> int:
        """Columns of each slab: a multiple of block_k."""
        return -(-k // (self.split * self.block_k)) * self.block_k

    def parts(self, k: int) -> int:
        """Slabs that are not empty."""
        return -(-k // self.slab(k))

    def constants(self, m: int, k: int) -> dict[str, int]:
        threads = 32 * self.warps
        shared = dict(BN=self.block_n, BK=self.block_k, THREADS=threads, COLUMNS=self.prefetched(k))
        if self.kernel == "rows":
            return dict(shared, ROWS=power_of_two(m), STAGES=self.stages)
        return dict(shared, BM=row_block(m), PARTS=self.parts(k))

    def prefetched(self, k: int) -> int:
        """Columns to ask for in advance: as many pieces of whole 16 bytes as there are threads."""
        threads = 32 * self.warps
        if self.block_n > threads:
            return 0
        piece = 8 * (threads // self.block_n)
        shortest = k - (self.parts(k) - 1) * self.slab(k)
        return min(shortest, self.prefetch // (2 * self.block_n)) // piece * piece


def power_of_two(number: int) -> int:
    """The next one, at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def row_block(m: int) -> int:
    """Rows of x are padded to 8, 16, 32 or 64; only the memory of the first m is touched."""
    return max(8, power_of_two(m))


def rows_plan(block_n: int = 4, warps: int = 4, stages: int = 1) -> Plan:
    """8 columns for each thread, so that w and x are spread over the threads alike."""
    return Plan("rows", block_n, 256 * warps, 1, warps, stages, prefetch=1 << 13)


def tiles_plan(block_n: int, m: int, split: int = 1) -> Plan:
    """Below 64 rows of w or 16 of x a warp works alone, and more of them would repeat its work."""
    alone = block_n < 64 or row_block(m) < 16
    warps = min(block_n // 16, 4) if alone else 4
    return Plan("tiles", block_n, STAGE_BYTES // (2 * block_n), split, warps)


def default_plan(m: int, n: int, k: int) -> Plan:
    if m <= 2:
        return rows_plan()
    block_n = {8: 16, 16: 32, 32: 64, 64: 128}[row_block(m)]
    if n > 8192:
        block_n = max(block_n, 64)
    split = 1
    while -(-n // block_n) * split < PROGRAMS and k // (2 * split) >= SHORTEST_SLAB:
        split *= 2
    return tiles_plan(block_n, m, split)


def candidates(m: int, n: int, k: int) -> list[Plan]:
    """Around the default: taller and flatter tiles, more and fewer slabs, deeper queues."""
    default = default_plan(m, n, k)
    middle = default_plan(max(m, 3), n, k)
    found = [default, default._replace(overlap=False), default._replace(prefetch=0)]
    found += [middle, middle._replace(stages=6), middle._replace(prefetch=1 << 16)]
    for block_n in (middle.block_n // 2, middle.block_n, 2 * middle.block_n):
        for split in (1, 2, 4, 8, 16):
            programs = -(-n // block_n) * split
            sound = 16 <= block_n <= 128 and k // split >= SHORTEST_SLAB
            if sound and (split == 1 or 64 <= programs <= 528):
                found.append(tiles_plan(block_n, m, split))
    if m <= ROWS_LIMIT:
        found += [rows_plan(), rows_plan(8), rows_plan(2), rows_plan(warps=8), rows_plan(stages=4)]
    return list(dict.fromkeys(found))
