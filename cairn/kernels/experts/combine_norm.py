"""The results of a token's experts become their sum, the new residual and its rmsnorm, in one pass.

    x = sum over k of weights[t, k] * results[place of pair (t, k)]  ->  total = x + residual  ->  y = rmsnorm(total)

Rounded where `combine` and `add_rmsnorm` round one after the other, so the result is theirs but for the order in which
a row's squares are added up; `combine_add_rmsnorm_fp8` quantises y by rows on the way, as `quantize` would. Bytes
moved: T * k rows and the residual read, the residual and y written: T rows less written and read than by two passes.
Forward only.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, as_rows, check, output
from cairn.kernels.dependent import begin, pdl
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.experts.combine import combine_reference
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.join_norm import add_and_norm
from cairn.kernels.norm.rmsnorm import add_rmsnorm_reference
from cairn.kernels.norm.rows import too_wide, width
from cairn.kernels.quantize.quantize import (
    Quantized,
    filled,
    quantize_reference,
    quantized_rows,
)

COLUMNS_PER_WARP = 256  # 16 bytes of each result for a thread


class Choices(NamedTuple):
    """The results of all tokens' experts, which are not summed yet."""

    results_PD: Tensor  # in the order of the experts
    places_P: Tensor  # int32: where each pair's result lies
    weights_TK: Tensor  # float32; 0: no expert


@triton.jit
def _combine_norm_kernel(
    results, places, weights, residual, norm_weight, y, total, scale,
    residual_stride, y_stride, total_stride, eps, PER_TOKEN: tl.constexpr, PLUS_ONE: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    token = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < COLUMNS
    at = token.to(tl.int64)
    before = tl.load(residual + at * residual_stride + column, mask=inside, other=0.0)
    sums = tl.zeros([WIDTH], tl.float32)
    for k in tl.static_range(PER_TOKEN):
        weight = tl.load(weights + token * PER_TOKEN + k)
        place = tl.load(places + token * PER_TOKEN + k).to(tl.int64)
        # Nothing was written for a choice of nobody.
        wanted = column < tl.where(weight != 0.0, COLUMNS, 0)
        result = tl.load(results + place * COLUMNS + column, mask=wanted, other=0.0)
        sums += weight * result.to(tl.float32)
    x = sums.to(results.dtype.element_ty).to(tl.float32)
    w = tl.load(norm_weight + column, mask=inside, other=0.0, eviction_policy="evict_last")
    y_row, total_row = y + at * y_stride + column, total + at * total_stride + column
    scale_row = None if scale is None else scale + token
    add_and_norm(x, before, w, y_row, total_row, scale_row, inside, eps, PLUS_ONE, COLUMNS, WIDTH)


def combine_add_rmsnorm(
    choices: Choices,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    plus_one: bool = False,
    residual_out: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """A residual [T, D] -> y like it, and the sum of all; that may be where the residual was."""
    total, how = _checked(choices, residual, weight, residual_out, impl)
    if how == "reference":
        summed = combine_reference(*choices)
        y, added = add_rmsnorm_reference(summed, residual, weight, eps, plus_one)
        return y, total.copy_(added)
    y = torch.empty_like(residual)
    _launch(choices, residual, weight, y, None, total, eps, plus_one)
    return y, total


def combine_add_rmsnorm_fp8(
    choices: Choices,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    plus_one: bool = False,
    residual_out: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Quantized, Tensor]:
    """The same with y quantised by rows."""
    total, how = _checked(choices, residual, weight, residual_out, impl)
    room = quantized_rows(residual, torch.float8_e4m3fn, None)
    if how == "reference":
        summed = combine_reference(*choices)
        y, added = add_rmsnorm_reference(summed, residual, weight, eps, plus_one)
        return filled(room, quantize_reference(y)), total.copy_(added)
    _launch(choices, residual, weight, room.values, room.scale, total, eps, plus_one)
    return room, total


def _checked(
    choices: Choices, residual: Tensor, weight: Tensor, residual_out: Tensor | None, impl: Impl
) -> tuple[Tensor, str]:
    """Room for the sum, and which implementation runs."""
    check("residual", residual, dtypes=FLOATS, shape=(None, None))
    tokens, columns = residual.shape
    results_PD, places_P, weights_TK = choices
    beside, each = residual, (tokens, None)
    check("weights_TK", weights_TK, dtypes=(torch.float32,), shape=each, beside=beside, packed=True)
    pairs = weights_TK.numel()
    shape = (pairs, columns)
    check("results_PD", results_PD, dtypes=FLOATS, shape=shape, beside=beside, packed=True)
    check("places_P", places_P, dtypes=(torch.int32,), shape=(pairs,), beside=beside, packed=True)
    check("weight", weight, dtypes=FLOATS, shape=(columns,), beside=beside, packed=True)
    total = output("residual_out", residual_out, residual.shape, residual.dtype, residual)
    offers = {"triton": needs_cuda(residual) or too_wide(columns), "reference": None}
    return total, choose("combine", impl, offers).impl


def _launch(
    choices: Choices,
    residual: Tensor,
    weight: Tensor,
    y: Tensor,
    scale: Tensor | None,
    total: Tensor,
    eps: float,
    plus_one: bool,
) -> None:
    tokens, columns = residual.shape
    if not tokens:
        return
    before, after = as_rows("residual", residual), as_rows("residual_out", total)
    strides = (before.stride(0), y.stride(0), after.stride(0))
    kernel: Any = _combine_norm_kernel
    kernel[(tokens,)](
        *choices, before, weight, y, after, scale, *strides, eps,
        PER_TOKEN=choices.weights_TK.shape[1], PLUS_ONE=plus_one, COLUMNS=columns,
        WIDTH=width(columns), num_warps=warps_of(columns), **pdl(residual.device),
    )  # fmt: skip


def warps_of(columns: int) -> int:
    return max(1, min(width(columns) // COLUMNS_PER_WARP, 16))


def cost(tokens: int, per_token: int, columns: int, fp8: bool = False) -> Cost:
    pairs = tokens * per_token
    moved = 2.0 * columns * (pairs + 2 * tokens) + (1.0 if fp8 else 2.0) * tokens * columns
    return Cost(2.0 * pairs * columns + 6.0 * tokens * columns, moved + 8.0 * pairs)
