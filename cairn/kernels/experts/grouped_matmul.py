"""Every expert's tokens through its own matrix, in one launch: y[i] = w[expert of i] @ x[i] for pairs sorted by expert.

    tiles: expert 0 rows 0..BM | expert 0 next BM | expert 1 ... each times BN rows of that expert's matrix

A program finds its expert in `ends` on the device, so nothing waits for the host and a CUDA graph can hold the launch;
its grid has room for the worst case, and programs without a tile leave at once. Tokens are gathered on the way in
(`gather`), SwiGLU is done on the way out, and the last product of a layer writes float32 parts for each token, weighed,
which the norm that follows sums in a fixed order (`grouped_parts`): no atomics, and no pass that permutes rows.

A few pairs need not be sorted (`FewPairs`): each is a tile of its own, and two that share an expert read it twice; in
MXFP4 they take `few_mxfp4`.
Many tokens of every expert go through `grouped_large` or `grouped_ring`. With `one_tile` a row's result
depends on that row alone. Forward only. Weights are in 16 bits, in float8 or in MXFP4 (`matrices`); the kernel is in
`grouped_kernel`.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.arguments import FLOATS, check, require, short
from cairn.kernels.dependent import pdl
from cairn.kernels.dispatch import Impl, choose, needs_cuda, needs_hopper
from cairn.kernels.experts import few_mxfp4
from cairn.kernels.experts.grouped_kernel import _grouped_kernel
from cairn.kernels.experts.grouped_large import LargeTiles, grouped_large
from cairn.kernels.experts.grouped_ring import grouped_ring, row_tiles
from cairn.kernels.experts.grouped_ring import unfit as ring_unfit
from cairn.kernels.experts.matrices import (
    TILE,
    ExpertMatrices,
    Fp8Experts,
    Mxfp4Experts,
    dequantized,
)
from cairn.kernels.experts.sort_pairs import FewPairs, Pairs
from cairn.kernels.kernel import Cost
from cairn.kernels.quantize.quantize import Quantized
from cairn.kernels.tiles import tma_obstacle
from cairn.kernels.tuned import tuned

Rows = Tensor | Quantized  # float8 rows where the matrices are float8


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
FP8_FEW = GroupTiles(16, 64, 256, 4, 3)
FP8_MANY = GroupTiles(128, 128, 128, 8, 4)
# 32 rows: wgmma takes 64, and would wait for every unpacked tile of gate and up.
MXFP4_FEW = GroupTiles(16, 32, 128, 4, 4)
MXFP4_MANY = GroupTiles(64, 32, 128, 4, 3)
LARGE = LargeTiles()
LARGE_FP8 = LargeTiles(block_k=128)
LEAST_LARGE = 128  # pairs of an expert on average, from which on the persistent form is faster
LEAST_GATHERED = 512  # and from which on the ring is, where it gathers and gates
MOST_PAIRS = 65536  # from here on all numbers of pairs share a configuration


class Gating(NamedTuple):
    """Gated epilogue silu(gate) * up, or its clamped form."""

    limit: float = 0.0  # above 0: min(gate, limit) * sigmoid(1.702 gate) * (clamp(up, limit) + 1)


SWIGLU = Gating()


def grouped_matmul_reference(
    x: Rows,
    w: ExpertMatrices,
    pairs: Pairs | FewPairs,
    *,
    gather: bool = False,
    gating: Gating | None = None,
    bias_EN: Tensor | None = None,
) -> Tensor:
    rows = x if isinstance(x, Tensor) else x.values.float() * x.scale
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    w_ENK = dequantized(w, wide)
    y = torch.zeros(pairs.total, w_ENK.shape[1], dtype=wide, device=rows.device)
    for expert, mine, sources in _groups(pairs):
        y[mine] = rows[sources if gather else mine].to(wide) @ w_ENK[expert].T
        if bias_EN is not None:
            y[mine] += bias_EN[expert].to(wide)
    if gating is not None:
        gate, up = y.chunk(2, dim=-1)
        y = gated_reference(gate, up, gating)
    return y.to(_result_type(x))


def gated_reference(gate: Tensor, up: Tensor, gating: Gating) -> Tensor:
    if not gating.limit:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def _result_type(x: Rows) -> torch.dtype:
    return x.dtype if isinstance(x, Tensor) else torch.bfloat16


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
    x: Rows,
    w: ExpertMatrices,
    pairs: Pairs | FewPairs,
    weights_TK: Tensor,
    bias_EN: Tensor | None = None,
) -> Tensor:
    rows = x if isinstance(x, Tensor) else x.values.float() * x.scale
    wide = rows.double() if rows.dtype == torch.float64 else rows.float()
    rows_PN = grouped_matmul_reference(wide, w, pairs, bias_EN=bias_EN)
    if isinstance(pairs, Pairs):
        rows_PN = rows_PN[pairs.places_P.long().clamp(0, len(rows_PN) - 1)]
    weighed_PN = rows_PN * weights_TK.flatten()[:, None]
    return weighed_PN.unflatten(0, weights_TK.shape).transpose(0, 1).contiguous()


def grouped_matmul(
    x: Rows,
    w_ENK: ExpertMatrices,
    pairs: Pairs | FewPairs,
    *,
    gather: bool = False,
    gating: Gating | None = None,
    bias_EN: Tensor | None = None,
    one_tile: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """Rows in the order of `pairs` [T * k, N]. `gather`: x has a row for each token, else for each pair in that order.

    With `gating` the first half of each matrix is the gate, and there are N / 2 columns.
    """
    tokens = pairs.total // pairs.per_token
    _check(x, w_ENK, pairs, tokens if gather else pairs.total, gating, bias_EN)
    offers = {"triton": obstacle(x, w_ENK), "reference": None}
    if choose("grouped_matmul", impl, offers).impl == "reference":
        return grouped_matmul_reference(
            x, w_ENK, pairs, gather=gather, gating=gating, bias_EN=bias_EN
        )
    plain = bias_EN is None and not one_tile
    many = _of_many(w_ENK, pairs) if plain else None
    if many and _suits_ring(*many, gating):
        return grouped_ring(x, *many, gather=gather, swiglu=gating is not None)
    # A gathered product would need its rows copied first, which costs more than the form gains.
    if many and not gather and gating is None:
        tiles = LARGE if isinstance(w_ENK, Tensor) else LARGE_FP8
        return grouped_large(x, many[0], many[1].ends_E, tiles)
    columns = w_ENK.shape[1] // 2 if gating is not None else w_ENK.shape[1]
    device = _values(x).device
    y_PN = torch.empty(pairs.total, columns, dtype=_result_type(x), device=device)
    if one_tile or not _launched_few(x, w_ENK, y_PN, pairs, None, bias_EN, gather, gating):
        tiles = tiles_for(pairs.total, w_ENK, gating is not None, one_tile)
        _launch(x, w_ENK, y_PN, pairs, None, tiles, bias_EN, gather=gather, gating=gating)
    return y_PN


def grouped_parts(
    x_PK: Rows,
    w_ENK: ExpertMatrices,
    pairs: Pairs | FewPairs,
    weights_TK: Tensor,
    *,
    bias_EN: Tensor | None = None,
    one_tile: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """Weighed results by choice and token, [k, T, N] float32. Rows of tokens without experts are not written."""
    _check(x_PK, w_ENK, pairs, pairs.total, None, bias_EN)
    shape = (pairs.total // pairs.per_token, pairs.per_token)
    values = _values(x_PK)
    check(
        "weights_TK", weights_TK, dtypes=(torch.float32,), shape=shape, beside=values, packed=True
    )
    offers = {"triton": obstacle(x_PK, w_ENK), "reference": None}
    if choose("grouped_matmul", impl, offers).impl == "reference":
        return grouped_parts_reference(x_PK, w_ENK, pairs, weights_TK, bias_EN)
    sums_KTN = torch.empty(
        *reversed(shape), w_ENK.shape[1], dtype=torch.float32, device=values.device
    )
    if one_tile or not _launched_few(x_PK, w_ENK, sums_KTN, pairs, weights_TK, bias_EN):
        tiles = tiles_for(pairs.total, w_ENK, False, one_tile)
        _launch(x_PK, w_ENK, sums_KTN, pairs, weights_TK, tiles, bias_EN)
    return sums_KTN


def listed(pairs: Pairs, w_ENK: ExpertMatrices, gating: Gating | None) -> Pairs:
    """Add the list of tiles if the matmul with `w_ENK` reads it, so that the next one can reuse it."""
    many = _of_many(w_ENK, pairs)
    if not many or not pairs.ends_E.is_cuda or not _suits_ring(*many, gating):
        return pairs
    return pairs._replace(row_tiles=row_tiles(pairs.ends_E, pairs.total))


def _of_many(
    w: ExpertMatrices, pairs: Pairs | FewPairs
) -> tuple[Tensor | Fp8Experts, Pairs] | None:
    """Both, if every expert has many tokens; a persistent kernel is faster then."""
    if isinstance(w, Mxfp4Experts) or isinstance(pairs, FewPairs):
        return None
    return (w, pairs) if pairs.total >= LEAST_LARGE * w.shape[0] else None


def _suits_ring(w: Tensor | Fp8Experts, pairs: Pairs, gating: Gating | None) -> bool:
    """Return whether the ring kernel is faster; in 16 bits it is for many gated rows."""
    if gating is None:
        return isinstance(w, Fp8Experts) and ring_unfit(w) is None
    many = pairs.total >= LEAST_GATHERED * w.shape[0]
    return many and gating == SWIGLU and ring_unfit(w) is None


def _launched_few(
    x: Rows,
    w: ExpertMatrices,
    y: Tensor,
    pairs: Pairs | FewPairs,
    weights_TK: Tensor | None,
    bias_EN: Tensor | None,
    gather: bool = False,
    gating: Gating | None = None,
) -> bool:
    """Launch the kernel for few pairs of MXFP4 experts if it applies; return whether it did."""
    few = isinstance(pairs, FewPairs) and isinstance(w, Mxfp4Experts) and isinstance(x, Tensor)
    if not few or not few_mxfp4.suits(x, w):
        return False
    limit = None if gating is None else gating.limit
    few_mxfp4.launch(x, w, y, pairs.experts_P, pairs.per_token, weights_TK, bias_EN, gather, limit)
    return True


def _values(x: Rows) -> Tensor:
    return x if isinstance(x, Tensor) else x.values


def _check(
    x: Rows,
    w: ExpertMatrices,
    pairs: Pairs | FewPairs,
    rows: int,
    gating: Gating | None,
    bias_EN: Tensor | None,
) -> None:
    count, columns, inner = _check_matrices(w)
    values = _values(x)
    kinds = (torch.float8_e4m3fn,) if isinstance(w, Fp8Experts) else FLOATS
    kinds = (w.dtype,) if isinstance(w, Tensor) else kinds
    check("x", values, dtypes=kinds, shape=(rows, inner), beside=_stored(w), packed=True)
    if isinstance(x, Quantized):
        check(
            "x.scale", x.scale, dtypes=(torch.float32,), shape=(rows, 1), beside=values, packed=True
        )
    fine = isinstance(x, Quantized) == isinstance(w, Fp8Experts)
    require(fine, "x", "float8 rows with scales where the matrices are float8", type(x).__name__)
    if bias_EN is not None:
        check("bias_EN", bias_EN, dtypes=FLOATS, shape=(count, columns), beside=values, packed=True)
    whole = (torch.int32,)
    if isinstance(pairs, FewPairs):
        check("experts_P", pairs.experts_P, dtypes=whole, shape=(None,), beside=values, packed=True)
    else:
        check("order_P", pairs.order_P, dtypes=whole, shape=(None,), beside=values, packed=True)
        size = (pairs.total,)
        check("places_P", pairs.places_P, dtypes=whole, shape=size, beside=values, packed=True)
        check("ends_E", pairs.ends_E, dtypes=whole, shape=(count,), beside=values, packed=True)
    fine = pairs.total % pairs.per_token == 0
    require(fine, "order_P", f"{pairs.per_token} pairs of each token", pairs.total)
    even = gating is None or columns % 2 == 0
    require(even, "w_ENK", "as many rows of gate as of up", columns)


def _check_matrices(w: ExpertMatrices) -> tuple[int, int, int]:
    three = (None, None, None)
    if isinstance(w, Tensor):
        check("w_ENK", w, dtypes=FLOATS, shape=three, packed=True)
    elif isinstance(w, Fp8Experts):
        check("w_ENK", w.values_ENK, dtypes=(torch.float8_e4m3fn,), shape=three, packed=True)
        check("w_ENK scales", w.scale_EN, dtypes=(torch.float32,), shape=w.shape[:2], packed=True)
    else:
        check("w_ENK", w.packed_ENB, dtypes=(torch.uint8,), shape=three, packed=True)
        count, rows, half = w.packed_ENB.shape
        groups = (count, half * 2 // 32, rows)
        check("w_ENK scales", w.scale_EGN, dtypes=(torch.uint8,), shape=groups, packed=True)
    count, columns, inner = w.shape
    require(min(count, columns, inner) > 0, "w_ENK", "experts, rows and columns", list(w.shape))
    return count, columns, inner


def _stored(w: ExpertMatrices) -> Tensor:
    """The tensor that TMA reads."""
    if isinstance(w, Tensor):
        return w
    return w.values_ENK if isinstance(w, Fp8Experts) else w.packed_ENB


def _scales(w: ExpertMatrices) -> Tensor | None:
    if isinstance(w, Tensor):
        return None
    return w.scale_EN if isinstance(w, Fp8Experts) else w.scale_EGN


def obstacle(x: Rows, w: ExpertMatrices) -> str | None:
    """Why the kernel cannot run these, or None."""
    values, stored = _values(x), _stored(w)
    wanted = (torch.bfloat16,) if isinstance(w, Mxfp4Experts) else (torch.bfloat16, torch.float16)
    if isinstance(w, Fp8Experts):
        wanted = (torch.float8_e4m3fn, torch.bfloat16)  # rows, or what they will be quantised from
    if values.dtype not in wanted:
        return f"it multiplies {' and '.join(map(short, wanted))}, not {short(values.dtype)}"
    if torch.is_grad_enabled() and (values.requires_grad or stored.requires_grad):
        return "it has no backward, and a gradient is wanted"
    off = needs_cuda(values, stored) or (needs_hopper(values) if values.is_cuda else None)
    return off or tma_obstacle("w_ENK", stored.flatten(0, 1))


def _key(pairs: int, w: ExpertMatrices, swiglu: bool) -> str:
    count, n, k = w.shape
    bucket = min(1 << max(pairs - 1, 7).bit_length(), MOST_PAIRS)
    kind = "" if isinstance(w, Tensor) else ",fp8" if isinstance(w, Fp8Experts) else ",mxfp4"
    return f"pairs={bucket},e={count},n={n},k={k},{'swiglu' if swiglu else 'plain'}{kind}"


def tiles_for(pairs: int, w: ExpertMatrices, swiglu: bool, one_tile: bool = False) -> GroupTiles:
    if one_tile:
        return MXFP4_FEW if isinstance(w, Mxfp4Experts) else FEW
    each = pairs / w.shape[0]
    if isinstance(w, Mxfp4Experts):
        default = MXFP4_FEW if each <= 48 else MXFP4_MANY
    elif isinstance(w, Fp8Experts):
        default = (
            FP8_FEW if each <= 12 else SOME if each <= 24 else MORE if each <= 64 else FP8_MANY
        )
    elif pairs <= 16 and swiglu:  # so few that narrow tiles give every multiprocessor one
        default = SINGLE
    else:
        default = FEW if each <= 12 else SOME if each <= 24 else MORE if each <= 64 else MANY
    return GroupTiles(**tuned("grouped_matmul", _key(pairs, w, swiglu), default._asdict()))


def _launch(
    x: Rows,
    w: ExpertMatrices,
    y: Tensor,
    pairs: Pairs | FewPairs,
    weights_TK: Tensor | None,
    tiles: GroupTiles,
    bias_EN: Tensor | None,
    *,
    gather: bool = False,
    gating: Gating | None = None,
) -> None:
    total, count, columns = pairs.total, w.shape[0], y.shape[-1]
    if not total:
        return
    few, packed = isinstance(pairs, FewPairs), isinstance(w, Mxfp4Experts)
    most = total if few else min(total, count) + total // tiles.block_m
    values, stored = _values(x), _stored(w)
    inner, across = w.shape[2], tiles.block_k // 2 if packed else tiles.block_k
    kernel: Any = _grouped_kernel
    kernel[(triton.cdiv(columns, tiles.block_n), min(most, total))](
        values,
        TensorDescriptor.from_tensor(stored.flatten(0, 1), [tiles.block_n, across]),
        y,
        None if isinstance(pairs, FewPairs) else pairs.order_P,
        pairs.experts_P if isinstance(pairs, FewPairs) else pairs.ends_E,
        weights_TK,
        x.scale if isinstance(x, Quantized) else None,
        _scales(w),
        bias_EN,
        values.stride(0),
        total // pairs.per_token,
        columns,
        inner,
        gating.limit if gating else 0.0,
        **constants(tiles, count, pairs.per_token, inner, gather, gating, packed),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl(values.device),
    )


def constants(
    tiles: GroupTiles,
    count: int,
    per_token: int,
    inner: int,
    gather: bool,
    gating: Gating | None,
    packed: bool = False,
) -> dict[str, int | bool]:
    return {
        "COUNT": count,
        "WIDTH": 1 << (count - 1).bit_length(),
        "PER_TOKEN": per_token,
        "GATHER": gather,
        "SWIGLU": gating is not None,
        "CLAMPED": gating is not None and gating.limit > 0,
        "MXFP4": packed,
        "EVEN": inner % tiles.block_k == 0,
        "TALL": packed or tiles.block_m < 64,
        "BM": tiles.block_m,
        "BN": tiles.block_n,
        "BK": TILE if packed else tiles.block_k,
    }


def cost(
    pairs: int, active: int, n: int, k: int, *, swiglu: bool = False, weight_bytes: float = 2.0
) -> Cost:
    """Cost with 16-bit activations; `active` is the number of experts with tokens, n counts gate and up."""
    columns = n // 2 if swiglu else n
    return Cost(2.0 * pairs * n * k, weight_bytes * active * n * k + 2.0 * pairs * (k + columns))
