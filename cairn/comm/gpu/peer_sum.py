"""Kernels that add up the same vector of several ranks, read straight from their memory.

    one-shot   every rank reads all vectors and adds them all up                       n reads, one wait
    two-shot   rank r adds up part r and writes the sum to everybody's result          the bytes of a ring,
                                                                                       two waits
Sums are in float32, in the order of the ranks, and rounded once: every rank has the same bits, and so has any number
of programs. `addresses` is an int64 tensor with one pointer for each rank, to memory that this GPU can reach and that
begins at a multiple of 16 bytes; offsets that are multiples of 16 elements are read in whole vectors. They do
not wait for anybody: `symmetric` does, before and between. Bytes moved for n ranks and a vector of S bytes: one-shot
(n + 1) S; two-shot 2 S and, over the links, 2 S (n-1)/n.
"""

# ruff: noqa: ANN001, ANN202  arguments of kernels are Triton's
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def peer_sum_reference(vectors: list[Tensor]) -> Tensor:
    """What every rank must have: added up in float32 in the order of the ranks, then rounded."""
    total = torch.zeros_like(vectors[0], dtype=torch.float32)
    for vector in vectors:
        total += vector.float()
    return total.to(vectors[0].dtype)


@triton.jit
def _sum_of(addresses, offset, at, inside, like, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Elements `at` of every rank's vector, which begins `offset` elements behind its address."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in tl.static_range(WORLD):
        vector = tl.multiple_of(tl.load(addresses + rank).to(like.dtype), 16)
        total += tl.load(vector + offset + at, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _one_shot_kernel(
    addresses, out, offset, count, WORLD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = _sum_of(addresses, offset, at, inside, out, WORLD, BLOCK)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _two_shot_kernel(
    addresses, like, offset, result, begin, end, WORLD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = begin + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < end
    total = _sum_of(addresses, offset, at, inside, like, WORLD, BLOCK)
    for rank in tl.static_range(WORLD):
        theirs = tl.multiple_of(tl.load(addresses + rank).to(like.dtype), 16)
        tl.store(theirs + result + at, total.to(like.dtype.element_ty), mask=inside)


def one_shot(addresses: Tensor, out: Tensor, offset: int) -> None:
    """`out` = the sum of everybody's vector. Everybody must have written it, and keep it until all have read."""
    if out.numel():
        grid = (triton.cdiv(out.numel(), BLOCK),)
        _one_shot_kernel[grid](
            addresses, out, offset, out.numel(),
            WORLD=len(addresses), BLOCK=BLOCK,  # pyrefly: ignore
        )  # fmt: skip


def two_shot(addresses: Tensor, like: Tensor, rank: int, offset: int, result: int) -> None:
    """This rank's part of the sum into everybody's result, `result` elements behind each address."""
    begin, end = part_of(like.numel(), rank, len(addresses))
    if end > begin:
        grid = (triton.cdiv(end - begin, BLOCK),)
        _two_shot_kernel[grid](
            addresses, like, offset, result, begin, end,
            WORLD=len(addresses), BLOCK=BLOCK,  # pyrefly: ignore
        )  # fmt: skip


def part_of(count: int, rank: int, world: int) -> tuple[int, int]:
    """The elements that a rank adds up: whole blocks, the last parts may be shorter or empty."""
    each = -(-count // world)
    each = -(-each // BLOCK) * BLOCK
    return min(rank * each, count), min((rank + 1) * each, count)
