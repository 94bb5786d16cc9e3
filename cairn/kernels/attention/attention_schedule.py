"""Order of the tiles of ragged sequences: longest first, in a list that a kernel writes on the GPU.

    list [1 + tiles, 4] int32      row 0: how many tiles      then, of each: start, length, first row, padded start

The padded start is where a sequence starts if each begins a tile of its own. A tile's work is the number of keys that
it sees. Its place in the list is the number of tiles with more work, or as much in an earlier sequence, which each
program counts for its own tile: no sort, and nothing read back by the host. Everyone who walks over such a list in
steps of the number of programs gets about the same amount of work.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.attention.attention_problem import Problem
from cairn.kernels.attention.attention_tiles import padded_start


@triton.jit(do_not_specialize=["sequences"])
def _schedule_kernel(
    cu, tiles, sequences, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr
):
    """One program per (sequence, tile) that may exist."""
    sequence = tl.program_id(0)
    tile = tl.program_id(1)
    start = tl.load(cu + sequence)
    length = tl.load(cu + sequence + 1) - start
    before = 0
    everything = 0
    for first in range(0, sequences, CHUNK):
        others = first + tl.arange(0, CHUNK)
        there = others < sequences
        begins = tl.load(cu + others, mask=there, other=0)
        lengths = tl.load(cu + others + 1, mask=there, other=0) - begins
        counts = tl.where(there, tl.cdiv(lengths, BLOCK), 0)
        if CAUSAL:  # tile t of any sequence sees about t + 1 blocks
            more = tl.maximum(counts - (tile + 1), 0)
            same = (counts > tile) & (others < sequence)
        else:  # every tile of a sequence sees all of it
            more = tl.where(lengths > length, counts, 0)
            same = tl.where((lengths == length) & (others < sequence), counts, 0)
        before += tl.sum(more + same.to(tl.int32))
        everything += tl.sum(counts)
    if not CAUSAL:
        before += tile
    if (sequence == 0) & (tile == 0):
        tl.store(tiles, everything)
    if tile * BLOCK < length:
        entry = tiles + 4 * (before + 1)
        tl.store(entry, start)
        tl.store(entry + 1, length)
        tl.store(entry + 2, tile * BLOCK)
        tl.store(entry + 3, padded_start(sequence, start, 0, BLOCK, False))


def schedule(problem: Problem, tokens: int, block: int) -> Tensor:
    """Schedule of ragged sequences with as many keys as queries. Bytes moved: negligible."""
    cu = problem.cu_q
    if cu is None:
        raise ValueError("problem: wanted ragged sequences, got equal lengths")
    room = tokens // block + problem.sequences
    tiles = torch.empty(1 + room, 4, dtype=torch.int32, device=cu.device)
    grid = (problem.sequences, triton.cdiv(problem.max_q, block))
    chunk = min(triton.next_power_of_2(problem.sequences), 1024)
    kernel: Any = _schedule_kernel
    kernel[grid](
        cu, tiles, problem.sequences, BLOCK=block, CAUSAL=problem.causal, CHUNK=chunk, num_warps=1
    )
    return tiles
