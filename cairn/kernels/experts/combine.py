"""The results of a token's experts become one: y[t] = sum over k of weights[t, k] * results[place of pair (t, k)].

`sort_pairs` says where the results lie; the sum runs over k in the token's own order, in float32,
and is rounded once: the same in every run. A choice of -1 adds nothing. Bytes: T * k rows read, T rows written.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, check
from cairn.kernels.dependent import begin, pdl
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost


def combine_reference(results_PD: Tensor, places_P: Tensor, weights_TK: Tensor) -> Tensor:
    wide = torch.float64 if results_PD.dtype == torch.float64 else torch.float32
    rows_TKD = (
        results_PD[places_P.long().clamp(0, len(results_PD) - 1)]
        .to(wide)
        .unflatten(0, weights_TK.shape)
    )
    weighed_TKD = torch.where(weights_TK[..., None] == 0, 0.0, rows_TKD * weights_TK[..., None])
    return weighed_TKD.sum(1).to(results_PD.dtype)


@triton.jit
def _combine_kernel(
    results, places, weights, y, D,
    PER_TOKEN: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    token = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for k in tl.static_range(PER_TOKEN):
        weight = tl.load(weights + token * PER_TOKEN + k)
        place = tl.load(places + token * PER_TOKEN + k).to(tl.int64)
        # Nothing was written for a choice of nobody.
        wanted = column < tl.where(weight != 0.0, D, 0)
        total += weight * tl.load(results + place * D + column, mask=wanted, other=0.0).to(
            tl.float32
        )
    tl.store(y + token.to(tl.int64) * D + column, total.to(y.dtype.element_ty), mask=column < D)


def combine(
    results_PD: Tensor, places_P: Tensor, weights_TK: Tensor, *, impl: Impl = "auto"
) -> Tensor:
    """[T, D] like the results; `places_P` int32: where each pair's result lies."""
    check("weights_TK", weights_TK, dtypes=(torch.float32,), shape=(None, None), packed=True)
    tokens, per_token = weights_TK.shape
    pairs = tokens * per_token
    check(
        "results_PD", results_PD, dtypes=FLOATS, shape=(pairs, None), beside=weights_TK, packed=True
    )
    check(
        "places_P", places_P, dtypes=(torch.int32,), shape=(pairs,), beside=weights_TK, packed=True
    )
    offers = {"triton": needs_cuda(results_PD), "reference": None}
    if choose("combine", impl, offers).impl == "reference":
        return combine_reference(results_PD, places_P, weights_TK)
    columns = results_PD.shape[1]
    y_TD = results_PD.new_empty(tokens, columns)
    if tokens:
        width = min(1 << (columns - 1).bit_length(), 1024)
        grid = (tokens, triton.cdiv(columns, width))
        kernel: Any = _combine_kernel
        kernel[grid](
            results_PD, places_P, weights_TK, y_TD, columns, PER_TOKEN=per_token, WIDTH=width,
            num_warps=max(1, width // 256), **pdl(results_PD.device),
        )  # fmt: skip
    return y_TD


def cost(tokens: int, per_token: int, columns: int) -> Cost:
    pairs = tokens * per_token
    return Cost(2.0 * pairs * columns, 2.0 * columns * (pairs + tokens) + 8.0 * pairs)
