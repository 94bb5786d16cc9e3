"""Rows of latent attention are stored in pages, in the model's type or with their latents in float8.

`latent_layout` says what lies where. Bytes moved: a row read in 16 bits, and written as it is stored.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.paged.latent_layout import RowLayout
from cairn.kernels.quantize.quantize import (
    FP8_LIMIT,
    LIMITS,
    SMALLEST,
    SMALLEST_LARGEST,
    fp8_scaled,
    rounded,
)

FP8 = torch.float8_e4m3fn
MANTISSA, EXPONENT = tl.constexpr(0x7FFFFF), tl.constexpr(0x7F800000)  # bits of a float32


def layout_of(cache: Tensor, rank: int, rotated: int) -> RowLayout:
    return RowLayout(rank, rotated, cache.dtype == FP8)


def views(cache: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same memory as latents, as scales and as keys; without float8 there are no scales."""
    if cache.dtype != FP8:
        return cache, cache, cache
    return cache, cache.view(torch.float32), cache.view(kind)


def packed_rows(rows_TE: Tensor, layout: RowLayout) -> Tensor:
    """Rows as a cache keeps them, [T, columns]."""
    if not layout.float8:
        return rows_TE
    latent_TR, key_TP = rows_TE.split((layout.rank, layout.rotated), dim=-1)
    wide_TGC = latent_TR.float().unflatten(-1, (-1, layout.group))
    least = wide_TGC.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / LIMITS[FP8]
    scale = ((least.view(torch.int32) + MANTISSA.value) & EXPONENT.value).view(torch.float32)
    values = rounded(wide_TGC / scale, FP8)
    parts = (values.flatten(1), scale.flatten(1).contiguous(), key_TP.contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1).view(FP8)


def unpacked_rows(stored_NB: Tensor, layout: RowLayout, kind: torch.dtype) -> Tensor:
    """Dequantised rows of a cache, [N, rank + rotated]."""
    if not layout.float8:
        return stored_NB
    latents, scales, keys = views(stored_NB, kind)
    scale_NG1 = scales[:, layout.scales_at : layout.scales_at + layout.scales, None]
    wide = latents[:, : layout.rank].float().unflatten(-1, (-1, layout.group)) * scale_NG1
    key = keys[:, layout.key_at : layout.key_at + layout.rotated]
    return torch.cat((wide.flatten(1).to(kind), key), dim=-1)


@triton.jit
def _power_of_2_scales(latent):
    """Of groups [G, C]: the smallest ones with which they fit float8."""
    largest = tl.maximum(tl.max(tl.abs(latent), axis=1), SMALLEST_LARGEST)
    bits = tl.div_rn(largest, FP8_LIMIT).to(tl.int32, bitcast=True)
    return ((bits + MANTISSA) & EXPONENT).to(tl.float32, bitcast=True)


@triton.jit
def _write_kernel(
    rows, slots, cache, scales, keys, row_stride, page_stride, token_stride,
    RANK: tl.constexpr, R: tl.constexpr, ROTATED: tl.constexpr, P: tl.constexpr, FLOAT8: tl.constexpr,
    GROUP: tl.constexpr, SCALES_AT: tl.constexpr, KEY_AT: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One token's row; padding has slot -1 and none."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        row = rows + token * row_stride
        at = (slot // PAGE).to(tl.int64) * page_stride + slot % PAGE * token_stride
        rotated = tl.arange(0, P)
        key = tl.load(row + RANK + rotated, mask=rotated < ROTATED)
        if FLOAT8:
            GROUPS: tl.constexpr = R // GROUP
            group = tl.arange(0, GROUPS)
            column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            latent = tl.load(row + column, mask=column < RANK, other=0.0).to(tl.float32)
            scale = _power_of_2_scales(latent)
            values = fp8_scaled(latent, (1.0 / scale)[:, None])
            tl.store(cache + at + column, values, mask=column < RANK)
            tl.store(scales + at // 4 + SCALES_AT + group, scale, mask=group < RANK // GROUP)
            tl.store(keys + at // 2 + KEY_AT + rotated, key, mask=rotated < ROTATED)
        else:
            latent_column = tl.arange(0, R)
            whole = latent_column < RANK
            tl.store(
                cache + at + latent_column, tl.load(row + latent_column, mask=whole), mask=whole
            )
            tl.store(keys + at + KEY_AT + rotated, key, mask=rotated < ROTATED)


def latent_write(
    rows_TE: Tensor, slots_T: Tensor, cache: Tensor, rank: int, impl: Impl = "auto"
) -> None:
    """Store rows [T, rank + rotated] in pages [pages, page_size, 1, columns]; slot -1 is stored nowhere."""
    layout = layout_of(cache, rank, rows_TE.shape[1] - rank)
    _check(rows_TE, slots_T, cache, layout)
    chosen = choose("latent_write", impl, {"triton": needs_cuda(rows_TE), "reference": None})
    page = cache.shape[1]
    if chosen.impl == "reference":
        kept_T = slots_T >= 0
        slots_T, stored = slots_T[kept_T].long(), packed_rows(rows_TE[kept_T], layout)
        there, stored = (x.view(torch.uint8) if layout.float8 else x for x in (cache, stored))
        there[slots_T // page, slots_T % page, 0] = stored
        return
    kernel: Any = _write_kernel
    kernel[(len(rows_TE),)](
        rows_TE, slots_T, *views(cache, rows_TE.dtype), rows_TE.stride(0), cache.stride(0), cache.stride(1),
        **layout.constants(), PAGE=page, num_warps=1,
    )  # fmt: skip


def _check(rows_TE: Tensor, slots_T: Tensor, cache: Tensor, layout: RowLayout) -> None:
    check("rows", rows_TE, dtypes=FLOATS, shape=(None, None))
    require(rows_TE.stride(1) == 1, "rows", "stride 1 in the last dimension", rows_TE.stride())
    require(layout.rotated > 0, "rank", f"fewer than {rows_TE.shape[1]} columns", layout.rank)
    whole = (torch.int32, torch.int64)
    check("slots", slots_T, dtypes=whole, shape=(len(rows_TE),), beside=rows_TE, packed=True)
    check_cache(cache, layout, rows_TE)


def check_cache(cache: Tensor, layout: RowLayout, beside: Tensor) -> None:
    kinds, shape = (beside.dtype, FP8), (None, None, 1, layout.columns)
    check("cache", cache, dtypes=kinds, shape=shape, beside=beside)
    require(cache.stride(3) == 1, "cache", "stride 1 in the last dimension", cache.stride())
    require(cache.shape[0] > 0, "cache", "at least one page", 0)
    why_not = layout.obstacle()
    require(why_not is None, "cache", "rows in whole words", why_not)
    fits = not layout.float8 or beside.element_size() == 2
    require(fits, "cache", "rows in the type of q, which is not one of 16 bits", "float8")
    page = cache.shape[1]
    require(page >= 16 and page & (page - 1) == 0, "cache", "pages of a power of 2 from 16", page)


def cost(tokens: int, layout: RowLayout) -> Cost:
    """Rows of 16 bits are read, and written as they are stored."""
    width = layout.rank + layout.rotated
    stored = layout.columns * (1 if layout.float8 else 2)
    return Cost(4.0 * tokens * layout.rank * layout.float8, tokens * (2.0 * width + stored))
