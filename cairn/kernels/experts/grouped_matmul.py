"""Every expert's tokens through its own matrix, in one launch: y[i] = w[expert of i] @ x[i] for pairs sorted by expert.

    tiles: expert 0 rows 0..BM | expert 0 next BM | expert 1 ... each times BN rows of that expert's matrix

A program finds its expert in `ends` on the device, so nothing waits for the host and a CUDA graph can hold the launch;
its grid has room for the worst case, and programs without a tile leave at once. Tokens are gathered on the way in
(`gather`), SwiGLU is done on the way out, and the last product of a layer writes float32 parts for each token, weighed,
which the norm that follows sums in a fixed order (`grouped_parts`): no atomics, and no pass that permutes rows.

A few pairs need not be sorted (`FewPairs`): each is a tile of its own, and two that share an expert read it twice.
Few tokens per expert are bound by the bytes of w: w's rows are then the tall side of the product, so that 16 tokens
waste nothing. With `one_tile` a row's result depends on that row alone. Forward only; bfloat16 and float16.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.arguments import FLOATS, check, require, short
from cairn.kernels.dependent import begin, pdl
from cairn.kernels.dispatch import Impl, choose, needs_cuda, needs_hopper
from cairn.kernels.experts.sort_pairs import FewPairs, Pairs
from cairn.kernels.kernel import Cost
from cairn.kernels.tiles import tma_obstacle
from cairn.kernels.tuned import tuned


class GroupTiles(NamedTuple):
    block_m: int  # tokens
    block_n: int  # columns of y; with SwiGLU so many of the gate and so many of up
    block_k: int
    warps: int
    stages: int

    def name(self) -> str:
        size = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{size}, {self.warps} warps, {self.stages} stages"


SINGLE = GroupTiles(16, 16, 256, 2, 4)
FEW = GroupTiles(16, 64, 128, 4, 3)
SOME = GroupTiles(32, 64, 128, 4, 4)
MORE = GroupTiles(64, 128, 64, 4, 4)
MANY = GroupTiles(128, 128, 64, 8, 4)
MOST_PAIRS = 65536  # from here on all numbers of pairs share a configuration


def grouped_matmul_reference(
    x: Tensor, w_ENK: Tensor, pairs: Pairs | FewPairs, *, gather: bool = False, swiglu: bool = False
) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = torch.zeros(pairs.total, w_ENK.shape[1], dtype=wide, device=x.device)
    for expert, rows, sources in _groups(pairs):
        y[rows] = x[sources if gather else rows].to(wide) @ w_ENK[expert].to(wide).T
    if swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y.to(x.dtype)


def _groups(pairs: Pairs | FewPairs) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each expert, its rows, and whose tokens they are."""
    if isinstance(pairs, FewPairs):
        for pair, expert in enumerate(pairs.experts_P.tolist()):
            if expert >= 0:
                yield expert, torch.tensor([pair]), torch.tensor([pair // pairs.per_token])
        return
    for expert, (first, end) in enumerate(itertools.pairwise([0, *pairs.ends_E.tolist()])):
        sources = pairs.order_P[first:end].long() // pairs.per_token
        yield expert, torch.arange(first, end, device=sources.device), sources


def grouped_parts_reference(
    x_PK: Tensor, w_ENK: Tensor, pairs: Pairs | FewPairs, weights_TK: Tensor
) -> Tensor:
    wide = x_PK.double() if x_PK.dtype == torch.float64 else x_PK.float()
    rows_PN = grouped_matmul_reference(wide, w_ENK, pairs)
    if isinstance(pairs, Pairs):
        rows_PN = rows_PN[pairs.places_P.long().clamp(0, len(rows_PN) - 1)]
    weighed_PN = rows_PN * weights_TK.flatten()[:, None]
    return weighed_PN.unflatten(0, weights_TK.shape).transpose(0, 1).contiguous()


@triton.jit
def _tile_of(ends, tile, COUNT: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr):
    """The expert of a tile, the tile's first row, and where the expert's rows end. Expert COUNT: no such tile."""
    e = tl.arange(0, WIDTH)
    end = tl.load(ends + e, mask=e < COUNT, other=0)
    start = tl.load(ends + e - 1, mask=(e > 0) & (e < COUNT), other=0)
    blocks = tl.where(e < COUNT, (end - start + BM - 1) // BM, 0)
    behind = tl.cumsum(blocks, axis=0)
    expert = tl.sum(((behind <= tile) & (e < COUNT)).to(tl.int32), axis=0)
    mine = e == expert
    first = tl.sum(tl.where(mine, start + (tile - behind + blocks) * BM, 0), axis=0)
    return expert, first, tl.sum(tl.where(mine, end, 0), axis=0)


@triton.jit
def _dot(w, x, sums, TALL: tl.constexpr):
    if TALL:
        return tl.dot(w, x.T, sums)
    else:
        return tl.dot(x, w.T, sums)


@triton.jit(do_not_specialize=["tokens"])
def _grouped_kernel(
    x, w, y, order, ends, weights, stride_x, tokens, N, K,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr, GATHER: tl.constexpr,
    SWIGLU: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """N columns of y. With SwiGLU each expert's matrix has 2 * N rows. `weights`: y is parts [PER_TOKEN, tokens, N].

    Without an `order`, `ends` has the expert of each pair.
    """
    begin(OVERLAP)
    n0 = tl.program_id(0) * BN
    tile = tl.program_id(1)
    if order is None:
        expert, first, end = tl.load(ends + tile), tile, tile + 1
    else:
        expert, first, end = _tile_of(ends, tile, COUNT, WIDTH, BM)
    if (expert >= 0) & (expert < COUNT):
        row = first + tl.arange(0, BM)
        real = row < end
        pair = row if order is None else tl.load(order + row, mask=real, other=0)
        source = pair // PER_TOKEN if GATHER else row
        rows = x + source.to(tl.int64)[:, None] * stride_x
        at = expert * (2 * N if SWIGLU else N) + n0
        sums = tl.zeros([BN, BM] if TALL else [BM, BN], tl.float32)
        up = tl.zeros([BN, BM] if TALL else [BM, BN], tl.float32)
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            known = real[:, None] if EVEN else real[:, None] & (k < K)[None, :]
            part = tl.load(rows + k[None, :], mask=known, other=0.0)
            sums = _dot(w.load([at, k0]), part, sums, TALL)
            if SWIGLU:
                up = _dot(w.load([at + N, k0]), part, up, TALL)
        if SWIGLU:
            sums = sums / (1.0 + tl.exp(-sums)) * up
        result = sums.T if TALL else sums
        n = n0 + tl.arange(0, BN)
        inside = real[:, None] & (n < N)[None, :]
        if weights is None:
            out = y + row.to(tl.int64)[:, None] * N + n[None, :]
        else:
            result *= tl.load(weights + pair, mask=real, other=0.0)[:, None]
            place = pair % PER_TOKEN * tokens + pair // PER_TOKEN
            out = y + place.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, result.to(y.dtype.element_ty), mask=inside)


def grouped_matmul(
    x: Tensor,
    w_ENK: Tensor,
    pairs: Pairs | FewPairs,
    *,
    gather: bool = False,
    swiglu: bool = False,
    one_tile: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """Rows in the order of `pairs` [T * k, N]. `gather`: x has a row for each token, else for each pair in that order.

    With `swiglu` the first half of each matrix is the gate, and there are N / 2 columns.
    """
    tokens = pairs.total // pairs.per_token
    _check(x, w_ENK, pairs, tokens if gather else pairs.total, swiglu)
    offers = {"triton": obstacle(x, w_ENK), "reference": None}
    if choose("grouped_matmul", impl, offers).impl == "reference":
        return grouped_matmul_reference(x, w_ENK, pairs, gather=gather, swiglu=swiglu)
    columns = w_ENK.shape[1] // 2 if swiglu else w_ENK.shape[1]
    y_PN = x.new_empty(pairs.total, columns)
    tiles = FEW if one_tile else tiles_for(pairs.total, w_ENK, swiglu)
    _launch(x, w_ENK, y_PN, pairs, None, tiles, gather=gather, swiglu=swiglu)
    return y_PN


def grouped_parts(
    x_PK: Tensor,
    w_ENK: Tensor,
    pairs: Pairs | FewPairs,
    weights_TK: Tensor,
    *,
    one_tile: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """Weighed results by choice and token, [k, T, N] float32. Rows of tokens without experts are not written."""
    _check(x_PK, w_ENK, pairs, pairs.total, swiglu=False)
    shape = (pairs.total // pairs.per_token, pairs.per_token)
    check("weights_TK", weights_TK, dtypes=(torch.float32,), shape=shape, beside=x_PK, packed=True)
    offers = {"triton": obstacle(x_PK, w_ENK), "reference": None}
    if choose("grouped_matmul", impl, offers).impl == "reference":
        return grouped_parts_reference(x_PK, w_ENK, pairs, weights_TK)
    sums_KTN = x_PK.new_empty(*reversed(shape), w_ENK.shape[1], dtype=torch.float32)
    tiles = FEW if one_tile else tiles_for(pairs.total, w_ENK, False)
    _launch(x_PK, w_ENK, sums_KTN, pairs, weights_TK, tiles)
    return sums_KTN


def _check(x: Tensor, w_ENK: Tensor, pairs: Pairs | FewPairs, rows: int, swiglu: bool) -> None:
    check("w_ENK", w_ENK, dtypes=FLOATS, shape=(None, None, None), packed=True)
    count, columns, inner = w_ENK.shape
    require(min(count, columns, inner) > 0, "w_ENK", "experts, rows and columns", list(w_ENK.shape))
    check("x", x, dtypes=(w_ENK.dtype,), shape=(rows, inner), beside=w_ENK, packed=True)
    whole = (torch.int32,)
    if isinstance(pairs, FewPairs):
        check("experts_P", pairs.experts_P, dtypes=whole, shape=(None,), beside=x, packed=True)
    else:
        check("order_P", pairs.order_P, dtypes=whole, shape=(None,), beside=x, packed=True)
        size = (pairs.total,)
        check("places_P", pairs.places_P, dtypes=whole, shape=size, beside=x, packed=True)
        check("ends_E", pairs.ends_E, dtypes=whole, shape=(count,), beside=x, packed=True)
    fine = pairs.total % pairs.per_token == 0
    require(fine, "order_P", f"{pairs.per_token} pairs of each token", pairs.total)
    require(not swiglu or columns % 2 == 0, "w_ENK", "as many rows of gate as of up", columns)


def obstacle(x: Tensor, w_ENK: Tensor) -> str | None:
    """Why the kernel cannot run these, or None."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"it multiplies bfloat16 and float16, not {short(x.dtype)}"
    if torch.is_grad_enabled() and (x.requires_grad or w_ENK.requires_grad):
        return "it has no backward, and a gradient is wanted"
    off = needs_cuda(x, w_ENK) or (needs_hopper(x) if x.is_cuda else None)
    return off or tma_obstacle("w_ENK", w_ENK.flatten(0, 1))


def _key(pairs: int, w_ENK: Tensor, swiglu: bool) -> str:
    count, n, k = w_ENK.shape
    bucket = min(1 << max(pairs - 1, 7).bit_length(), MOST_PAIRS)
    return f"pairs={bucket},e={count},n={n},k={k},{'swiglu' if swiglu else 'plain'}"


def tiles_for(pairs: int, w_ENK: Tensor, swiglu: bool) -> GroupTiles:
    each = pairs / len(w_ENK)
    if (
        pairs <= 16 and swiglu
    ):  # so few that narrow tiles are needed to give every multiprocessor one
        default = SINGLE
    else:
        default = FEW if each <= 12 else SOME if each <= 24 else MORE if each <= 64 else MANY
    return GroupTiles(**tuned("grouped_matmul", _key(pairs, w_ENK, swiglu), default._asdict()))


def _launch(
    x: Tensor,
    w_ENK: Tensor,
    y: Tensor,
    pairs: Pairs | FewPairs,
    weights_TK: Tensor | None,
    tiles: GroupTiles,
    *,
    gather: bool = False,
    swiglu: bool = False,
) -> None:
    total, count, columns = pairs.total, len(w_ENK), y.shape[-1]
    if not total:
        return
    few = isinstance(pairs, FewPairs)
    most = total if few else min(total, count) + total // tiles.block_m
    kernel: Any = _grouped_kernel
    kernel[(triton.cdiv(columns, tiles.block_n), min(most, total))](
        x,
        TensorDescriptor.from_tensor(w_ENK.flatten(0, 1), [tiles.block_n, tiles.block_k]),
        y,
        None if isinstance(pairs, FewPairs) else pairs.order_P,
        pairs.experts_P if isinstance(pairs, FewPairs) else pairs.ends_E,
        weights_TK,
        x.stride(0),
        total // pairs.per_token,
        columns,
        x.shape[1],
        **constants(tiles, count, pairs.per_token, x.shape[1], gather, swiglu),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl(x.device),
    )


def constants(
    tiles: GroupTiles, count: int, per_token: int, inner: int, gather: bool, swiglu: bool
) -> dict[str, int | bool]:
    return {
        "COUNT": count,
        "WIDTH": 1 << (count - 1).bit_length(),
        "PER_TOKEN": per_token,
        "GATHER": gather,
        "SWIGLU": swiglu,
        "EVEN": inner % tiles.block_k == 0,
        "TALL": tiles.block_m < 64,
        "BM": tiles.block_m,
        "BN": tiles.block_n,
        "BK": tiles.block_k,
    }


def cost(pairs: int, active: int, n: int, k: int, *, swiglu: bool = False) -> Cost:
    """Of 16-bit values; `active`: experts that have tokens; n counts gate and up."""
    columns = n // 2 if swiglu else n
    return Cost(2.0 * pairs * n * k, 2.0 * (active * n * k + pairs * (k + columns)))
