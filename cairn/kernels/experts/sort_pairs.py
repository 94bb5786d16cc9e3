"""All (token, expert) pairs in the order of their experts: a counting sort on the device, without atomics.

    chosen [T, k]  ->  order [T * k]: pairs of expert 0 | of expert 1 | ...     ends [E]: where each expert's pairs end

A pair is token * k + its place among the token's choices. One program per expert reads every choice and keeps its own,
so that pairs of an expert stay in the order of the tokens, in every run. A choice of -1 belongs to nobody: `order`
says nothing behind the last end, and `places` nothing of such a pair. Bytes: E times the choices, which come from the
L2 cache. Many pairs are cut into chunks, a program for each and all experts: one launch counts, a second one places.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import check, require
from cairn.kernels.dependent import begin, pdl
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost

MOST_AT_ONCE = 2048  # choices that a program holds in registers
MANY = 16384  # pairs that are cut into chunks
CHUNK = 1024
MOST_CHUNKS = 256
CELLS = 16384  # choices x experts that a program compares at once

FEW_PAIRS = 32  # they rarely share an expert: sorting them costs more than reading one twice


class Pairs(NamedTuple):
    """Pairs sorted by expert; all int32."""

    order_P: Tensor  # which pair lies where
    places_P: Tensor  # where each pair lies
    ends_E: Tensor  # where each expert's pairs end
    per_token: int
    row_tiles: Tensor | None = None  # the list of `grouped_ring`, where several products share it

    @property
    def total(self) -> int:
        return self.order_P.numel()


class FewPairs(NamedTuple):
    """Pairs in the order of the tokens, so few that each is treated alone: nothing has to be sorted."""

    experts_P: Tensor  # int32; -1: nobody
    per_token: int

    @property
    def total(self) -> int:
        return self.experts_P.numel()


def sort_pairs_reference(chosen_TK: Tensor, count: int) -> Pairs:
    flat_P = chosen_TK.flatten().long()
    order_P = torch.where(flat_P < 0, count, flat_P).sort(stable=True).indices
    sizes_E = (flat_P == torch.arange(count, device=flat_P.device)[:, None]).sum(1)
    return Pairs(
        order_P.int(), order_P.argsort().int(), sizes_E.cumsum(0).int(), chosen_TK.shape[1]
    )


@triton.jit(do_not_specialize=["pairs"])
def _sort_pairs_kernel(
    chosen, order, places, ends, pairs, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    begin(OVERLAP)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    mine = tl.zeros([BLOCK], tl.int32)
    for first in range(0, pairs, BLOCK):
        found = tl.load(chosen + first + lane, mask=first + lane < pairs, other=-1)
        before += ((found >= 0) & (found < expert)).to(tl.int32)
        mine += (found == expert).to(tl.int32)
    place = tl.sum(before, axis=0)
    tl.store(ends + expert, place + tl.sum(mine, axis=0))
    for first in range(0, pairs, BLOCK):
        found = tl.load(chosen + first + lane, mask=first + lane < pairs, other=-1)
        is_mine = found == expert
        rank = tl.cumsum(is_mine.to(tl.int32), axis=0)
        tl.store(order + place + rank - 1, first + lane, mask=is_mine)
        tl.store(places + first + lane, place + rank - 1, mask=is_mine)
        place += tl.max(rank, axis=0)


@triton.jit(do_not_specialize=["pairs", "chunk"])
def _count_kernel(
    chosen, counts, pairs, chunk,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """How many pairs of a chunk each expert has; counts [chunks, E]."""
    begin(OVERLAP)
    lane, e = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    start = tl.program_id(0) * chunk
    found_E = tl.zeros([WIDTH], tl.int32)
    for first in range(start, tl.minimum(start + chunk, pairs), BLOCK):
        found = tl.load(chosen + first + lane, mask=first + lane < pairs, other=-1)
        found_E += tl.sum((found[:, None] == e[None, :]).to(tl.int32), axis=0)
    tl.store(counts + tl.program_id(0) * COUNT + e, found_E, mask=e < COUNT)


@triton.jit(do_not_specialize=["pairs", "chunk"])
def _place_kernel(
    chosen, order, places, ends, counts, pairs, chunk, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The pairs of a chunk go behind all of earlier experts, and behind those of earlier chunks."""
    begin(OVERLAP)
    lane, e = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    here, chunks = tl.program_id(0), tl.num_programs(0)
    all_E = tl.zeros([WIDTH], tl.int32)
    next_E = tl.zeros([WIDTH], tl.int32)  # where the next pair of each expert goes
    for first in range(0, chunks, BLOCK):
        rows = first + lane
        mask = (rows < chunks)[:, None] & (e < COUNT)[None, :]
        counted = tl.load(counts + rows[:, None] * COUNT + e[None, :], mask=mask, other=0)
        all_E += tl.sum(counted, axis=0)
        next_E += tl.sum(tl.where((rows < here)[:, None], counted, 0), axis=0)
    next_E += tl.cumsum(all_E, axis=0) - all_E
    start = here * chunk
    for first in range(start, tl.minimum(start + chunk, pairs), BLOCK):
        found = tl.load(chosen + first + lane, mask=first + lane < pairs, other=-1)
        hits = (found[:, None] == e[None, :]).to(tl.int32)
        # Sums over a tile are quicker than a scan down its columns.
        alike = (found[:, None] == found[None, :]) & (lane[None, :] < lane[:, None])
        place = tl.sum(hits * next_E[None, :], axis=1) + tl.sum(alike.to(tl.int32), axis=1)
        tl.store(order + place, first + lane, mask=found >= 0)
        tl.store(places + first + lane, place, mask=found >= 0)
        next_E += tl.sum(hits, axis=0)
    if here == chunks - 1:
        tl.store(ends + e, next_E, mask=e < COUNT)


def sort_pairs(chosen_TK: Tensor, count: int, *, impl: Impl = "auto") -> Pairs:
    """`chosen_TK`: int32 experts below `count`, or -1."""
    check("chosen_TK", chosen_TK, dtypes=(torch.int32,), shape=(None, None), packed=True)
    require(count >= 1, "count", "at least one expert", count)
    offers = {"triton": needs_cuda(chosen_TK), "reference": None}
    if choose("sort_pairs", impl, offers).impl == "reference":
        return sort_pairs_reference(chosen_TK, count)
    pairs = chosen_TK.numel()
    order_P, places_P = torch.empty(2, pairs, dtype=torch.int32, device=chosen_TK.device).unbind()
    ends_E = torch.empty(count, dtype=torch.int32, device=chosen_TK.device)
    sorted_pairs = Pairs(order_P, places_P, ends_E, chosen_TK.shape[1])
    if pairs >= MANY:
        _sort_in_chunks(chosen_TK, sorted_pairs)
        return sorted_pairs
    block = block_of(pairs)
    kernel: Any = _sort_pairs_kernel
    kernel[(count,)](
        chosen_TK,
        order_P,
        places_P,
        ends_E,
        pairs,
        BLOCK=block,
        num_warps=warps_of(block),
        **pdl(chosen_TK.device),
    )
    return sorted_pairs


def _sort_in_chunks(chosen_TK: Tensor, into: Pairs) -> None:
    pairs, count = chosen_TK.numel(), len(into.ends_E)
    # Doubled until there are few enough: every program reads what all have counted.
    chunk = CHUNK << (-(-pairs // (CHUNK * MOST_CHUNKS)) - 1).bit_length()
    chunks = -(-pairs // chunk)
    counts = torch.empty(chunks, count, dtype=torch.int32, device=chosen_TK.device)
    how = {**chunk_constants(count), "num_warps": 8, **pdl(chosen_TK.device)}
    first: Any = _count_kernel
    first[(chunks,)](chosen_TK, counts, pairs, chunk, **how)
    second: Any = _place_kernel
    second[(chunks,)](chosen_TK, *into[:3], counts, pairs, chunk, **how)


def chunk_constants(count: int) -> dict[str, int]:
    """A tile of choices x experts in the registers of eight warps."""
    wide = 1 << (count - 1).bit_length()
    return {"COUNT": count, "WIDTH": wide, "BLOCK": max(16, min(CHUNK, CELLS // wide))}


def block_of(pairs: int) -> int:
    return min(1 << max(pairs - 1, 31).bit_length(), MOST_AT_ONCE)


def warps_of(block: int) -> int:
    return max(1, block // 256)


def cost(pairs: int, count: int) -> Cost:
    return Cost(4.0 * pairs * count, 8.0 * pairs + 4.0 * count)
