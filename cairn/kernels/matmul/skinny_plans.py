"""Launch plans of matmuls with few rows: sizes in, a plan out; nothing runs here.

Reasons behind the defaults, measured on an H200 (132 multiprocessors, 4.5 TB/s of reads):

    one row     4 rows of w for a program, whole, in registers
    tall w      many programs with three small rings on a multiprocessor: those of one fill while another's are used
    others      one tile of 64 rows for a program and the deepest ring that fits. 64 to 96 programs read as fast as 132,
                and the successor's fill the rest of the chip; cutting K to have more costs more than it brings
    short w     too few tiles even for that: K is cut, and a second kernel joins the parts

Every program reads all of x from the L2 cache: with 64 rows as many bytes as weights, and that is the limit there.
With more rows only small products gain, because what they lose there is less than what cuBLAS waits for its launch: up
to 128 rows all of them, up to 256 those whose parts are joined with the norm that follows (6.8 and 7.9 us for the two
of Qwen3-0.6B, norm included, beside 7.9 and 9.2). Of large products only a tall one with SwiGLU gains, from 97 to 128
rows (4 of 141 us that the products of a layer of Qwen3-8B take), in tiles of 192 rows of w. Beyond that the tensor
cores are what a product waits for, and those are as fast as the power of the chip allows, whoever feeds them: a kernel
with a copying warp and two warpgroups for 256 rows at once was 2 us ahead of cuBLAS there, and behind it at 160.

In float8 cuBLAS has tiles of 128 x 128 only, and a product whose n is short fills a quarter of the chip with them: here
the four of a layer of Qwen3-8B take 72 us in place of 99 with 128 rows, and 95 in place of 119 with 192 (`wave_plan`).
"""

import functools
from typing import NamedTuple

from cairn.kernels.few_rows import MOST_ROWS, TILE_ROWS, padded_rows

PIECE = 64  # rows of w that a warpgroup multiplies at once
FEW_ROWS = 64
SMALL = 8 << 20  # elements of w
PROGRAMS = 64  # fewer cannot read at the memory's rate
TALL = 264  # tiles from which programs share multiprocessors
TALL_ROWS = 96  # of x: with more, a tall product with SwiGLU is ahead of cuBLAS and a kernel
LARGE_RING = 226 << 10  # bytes of shared memory
HALF_RING = 110 << 10  # of two programs that share a multiprocessor
SMALL_RING = 72 << 10
BESIDE_RING = 120 << 10  # what the decode kernel of attention leaves when it runs at the same time
BESIDE_8_BITS = 116 << 10  # the same with keys and values in float8
SHORTEST_PART = 512  # columns
HELD = 64  # registers of a thread for weights
PAIRED = 180  # programs from which two on a multiprocessor are ahead of cuBLAS's tiles
MULTIPROCESSORS = 132  # of an H200; on another chip a plan is slower, not wrong


class Plan(NamedTuple):
    kernel: str = "stream"  # or "row"
    block_n: int = PIECE  # rows of w that a program takes
    block_k: int = 128  # columns at a time
    split: int = 1  # parts of K
    warps: int = 4
    stages: int = 4  # buffers of a ring
    overlap: bool = True  # start before the predecessor has ended

    def parts(self, k: int) -> int:
        """Number of parts that are not empty."""
        return min(self.split, -(-k // self.block_k))


def skinny_is_faster(m: int, n: int, k: int, *, gated: bool = False) -> bool:
    """Is this kernel, with what it joins (`gated`: SwiGLU, too), ahead of cuBLAS for m rows and n x k weights?"""
    if gated and n >= TALL * PIECE and TALL_ROWS < m <= TILE_ROWS:
        return True
    most = MOST_ROWS if n < k else TILE_ROWS  # parts of a long K are joined with the norm behind
    return m <= FEW_ROWS or (m <= most and n * k <= SMALL)


def row_block(m: int) -> int:
    """Rows of a program."""
    return min(padded_rows(m), TILE_ROWS)


def row_plan(k: int, block_n: int = 4, warps: int = 0) -> Plan:
    """Threads read 8 columns at a time, and keep `block_n` rows of w."""
    warps = warps or (4 if k <= 4096 else 8)
    while block_n > 2 and block_n * k > 2 * HELD * 32 * warps:
        block_n //= 2
    return Plan("row", block_n, 256 * warps, 1, warps, 1)


def stream_plan(
    m: int, k: int, pieces: int = 1, split: int = 1, block_k: int = 0, ring: int = LARGE_RING
) -> Plan:
    """Plan with as many stages as fit into the ring and as there are steps."""
    rows = row_block(m)
    block_k = block_k or (256 if rows <= 32 and split == 1 else 128)
    steps = -(-k // (block_k * split))
    stage = 2 * block_k * (pieces * PIECE + rows)
    return Plan("stream", pieces * PIECE, block_k, split, 4, max(1, min(ring // stage, steps)))


def default_plan(m: int, n: int, k: int) -> Plan:
    if m == 1 and k <= 1 << 14:
        return row_plan(k)
    tiles = -(-n // PIECE)
    if tiles >= TALL and m > FEW_ROWS:
        return stream_plan(m, k, pieces=3, block_k=64)
    if tiles >= TALL:
        return stream_plan(m, k, block_k=128, ring=SMALL_RING)
    split = 1
    while tiles * split < PROGRAMS and k >= 2 * split * SHORTEST_PART:
        split *= 2
    return stream_plan(m, k, split=split)


@functools.lru_cache(maxsize=4096)
def wave_plan(m: int, n: int, k: int) -> Plan | None:
    """65 to 256 rows of float8; None where cuBLAS is faster.

    What counts is that all programs run at once: one on each multiprocessor, or two on most of them. K is cut where the
    norm that follows joins its parts (n <= k). Beyond 128 rows each weight is read by two programs.
    """
    blocks, tiles = -(-m // TILE_ROWS), -(-n // PIECE)
    split = 1
    while (
        n <= k and 2 * split * tiles * blocks <= MULTIPROCESSORS and k >= 4 * split * SHORTEST_PART
    ):
        split *= 2
    pieces = 3 if tiles >= TALL else 1
    programs = -(-tiles // pieces) * blocks * split
    if m > MOST_ROWS or programs > 2 * MULTIPROCESSORS:
        return None
    if programs <= MULTIPROCESSORS:
        return _fp8_stream_plan(m, k, pieces, split, 256 // min(pieces, 2), LARGE_RING)
    if programs >= PAIRED:
        return _fp8_stream_plan(m, k, pieces, split, 128, HALF_RING)
    return None


def _fp8_stream_plan(m: int, k: int, pieces: int, split: int, block_k: int, ring: int) -> Plan:
    """Plan of the 16-bit matmul with as many bytes."""
    half = stream_plan(m, -(-k // 2), pieces, split, block_k // 2, ring)
    return half._replace(block_k=block_k)


def beside_plan(m: int, n: int, k: int, ring: int = BESIDE_RING) -> Plan:
    """Plan for a matmul that runs concurrently with attention: it must fit beside it, and need not be fast."""
    usual = default_plan(m, n, k)
    if usual.kernel == "row":
        return usual
    block_k = 64 if row_block(m) == TILE_ROWS else 128
    return stream_plan(m, k, split=usual.split, block_k=block_k, ring=ring)


def candidates(m: int, n: int, k: int) -> list[Plan]:
    """Around the default: wider and narrower steps, taller tiles, more and fewer parts, small rings."""
    default = default_plan(m, n, k)
    found = [default, default._replace(overlap=False)]
    if m == 1:
        found += [row_plan(k, block_n, warps) for block_n in (2, 4, 8) for warps in (4, 8)]
    tiles = -(-n // PIECE)
    for split in (1, 2, 4, 8):
        if split == 1 or (PROGRAMS <= tiles * split < TALL and k >= split * SHORTEST_PART // 2):
            found += [stream_plan(m, k, 1, split, block_k) for block_k in (128, 256)]
    if tiles >= TALL:
        found += [stream_plan(m, k, 2, 1, 128), stream_plan(m, k, 3, 1, 64)]
    if m > FEW_ROWS:
        found += [stream_plan(m, k, 2, split, width) for split in (1, 2, 4, 8) for width in (64, 128)
                  if k >= split * SHORTEST_PART // 2]  # fmt: skip
    return list(dict.fromkeys(found))
