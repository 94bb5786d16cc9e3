"""All (token, expert) pairs in the order of their experts: a counting sort on the device, without atomics.

    chosen [T, k]  ->  order [T * k]: pairs of expert 0 | of expert 1 | ...     ends [E]: where each expert's pairs end

A pair is token * k + its place among the token's choices. One program per expert reads every choice and keeps its own,
so that pairs of an expert stay in the order of the tokens, in every run. A choice of -1 belongs to nobody: `order`
says nothing behind the last end, and `places` nothing of such a pair. Bytes: E times the choices, which come from the
L2 cache.
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
    return Pairs(order_P, places_P, ends_E, chosen_TK.shape[1])


def block_of(pairs: int) -> int:
    return min(1 << max(pairs - 1, 31).bit_length(), MOST_AT_ONCE)


def warps_of(block: int) -> int:
    return max(1, block // 256)


def cost(pairs: int, count: int) -> Cost:
    return Cost(4.0 * pairs * count, 8.0 * pairs + 4.0 * count)
