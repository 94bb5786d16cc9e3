"""All (token, expert) pairs in the order of their experts: a counting sort on the device, without atomics.

    chosen [T, k]  ->  order [T * k]: pairs of expert 0 | of expert 1 | ...     ends [E]: where each expert's pairs end

A pair is token * k + its place among the token's choices. One program per expert reads every choice and keeps its own,
so that pairs of an expert stay in the order of the tokens, in every run. A choice of -1 belongs to nobody: `order`
says nothing behind the last end, and `places` nothing of such a pair. Bytes: E times the choices, which come from the
L2 cache. Many pairs are cut into chunks, so that more programs share them: one launch counts, a second one places.
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
CHUNK = 8192  # pairs; from two of them on they are treated apart
MOST_CHUNKS = 32

FEW_PAIRS = 32  # they rarely share an expert: sorting them costs more than reading one twice


class Pairs(NamedTuple):
    """Pairs sorted by expert; all int32."""

    order_P: Tensor  # which pair lies where
    places_P: Tensor  # where each pair lies
    ends_E: Tensor  # where each expert's pairs end
    per_token: int

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
def _count_kernel(chosen, counts, pairs, chunk, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """How many pairs of a chunk an expert has; counts [E, chunks]."""
    begin(OVERLAP)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    start = tl.program_id(1) * chunk
    mine = tl.zeros([BLOCK], tl.int32)
    for first in range(start, tl.minimum(start + chunk, pairs), BLOCK):
        found = tl.load(chosen + first + lane, mask=first + lane < pairs, other=-1)
        mine += (found == expert).to(tl.int32)
    at = expert * tl.num_programs(1) + tl.program_id(1)
    tl.store(counts + at, tl.sum(mine, axis=0))


@triton.jit(do_not_specialize=["pairs", "chunk"])
def _place_kernel(
    chosen, order, places, ends, counts, pairs, chunk,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The pairs of one expert in one chunk go behind all that were counted before them."""
    begin(OVERLAP)
    expert = tl.program_id(0)
    chunks = tl.num_programs(1)
    lane = tl.arange(0, BLOCK)
    me = expert * chunks + tl.program_id(1)
    every = tl.arange(0, WIDTH)
    place = tl.sum(tl.load(counts + every, mask=every < me, other=0), axis=0)
    start = tl.program_id(1) * chunk
    for first in range(start, tl.minimum(start + chunk, pairs), BLOCK):
        found = tl.load(chosen + first + lane, mask=first + lane < pairs, other=-1)
        is_mine = found == expert
        rank = tl.cumsum(is_mine.to(tl.int32), axis=0)
        tl.store(order + place + rank - 1, first + lane, mask=is_mine)
        tl.store(places + first + lane, place + rank - 1, mask=is_mine)
        place += tl.max(rank, axis=0)
    if tl.program_id(1) == chunks - 1:
        tl.store(ends + expert, place)


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
    if pairs >= 2 * CHUNK:
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
    most = -(
        -pairs // (CHUNK * MOST_CHUNKS)
    )  # as many as fit, doubled until there are few enough chunks
    chunk = CHUNK << (most - 1).bit_length()
    chunks, block = -(-pairs // chunk), min(chunk, MOST_AT_ONCE)
    counts = torch.empty(count, chunks, dtype=torch.int32, device=chosen_TK.device)
    how = {"BLOCK": block, "num_warps": warps_of(block), **pdl(chosen_TK.device)}
    first: Any = _count_kernel
    first[(count, chunks)](chosen_TK, counts, pairs, chunk, **how)
    second: Any = _place_kernel
    width = 1 << (counts.numel() - 1).bit_length()
    second[(count, chunks)](chosen_TK, *into[:3], counts, pairs, chunk, WIDTH=width, **how)


def block_of(pairs: int) -> int:
    return min(1 << max(pairs - 1, 31).bit_length(), MOST_AT_ONCE)


def warps_of(block: int) -> int:
    return max(1, block // 256)


def cost(pairs: int, count: int) -> Cost:
    return Cost(4.0 * pairs * count, 8.0 * pairs + 4.0 * count)
