"""Decode over latent rows in float8: products of the columns of each scale, all scales at once.

    scores  = sum over groups g of scale[n, g] * (q[:, g] . stored[n, g]) + rotated
    out[g] += (weights * scale[:, g]) @ stored[:, g]

Scales multiply scores and weights, which are few, instead of the rows themselves, and a group of 128 columns is a
product of its own in the batch that `tl.dot` takes. `latent_attention` says what is computed and adds up the parts.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.paged.latent_layout import RowLayout
from cairn.kernels.paged.latent_rows import views
from cairn.kernels.paged.paged_tiles import LOG2_E, pages_of, rows_of

if TYPE_CHECKING:
    from cairn.kernels.paged.latent_attention import Latents

HEADS = 16  # of a tile: what a product takes


class Float8Plan(NamedTuple):
    block: int = 32  # rows of the cache in a step
    warps: int = 4
    stages: int = 2


PLAN = Float8Plan()


def unfit(call: "Latents") -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    heads, layout = call.q_THE.shape[1], call.layout
    if call.max_query > 1 or call.starts is not None:
        return "it takes one query of each sequence"
    if heads > HEADS and heads % HEADS:
        return f"{heads} heads are neither at most {HEADS} nor a multiple of it"
    if layout.group < 16 or layout.scales & (layout.scales - 1):
        return f"{layout.scales} scales of {layout.group} columns are no tile"
    if layout.rotated < 16 or layout.rotated & (layout.rotated - 1):
        return f"keys have {layout.rotated} columns"
    return None


@triton.jit
def _float8_kernel(
    q, cache, scales, keys, tables, lengths, out, lse, tokens, scale, table_stride, q_token, q_head, page_stride,
    token_stride, HEADS: tl.constexpr, TILE: tl.constexpr, ROTATED: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SCALES_AT: tl.constexpr, KEY_AT: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """TILE heads of one sequence over one part of its rows."""
    HEAD_TILES: tl.constexpr = (HEADS + TILE - 1) // TILE
    sequence, part = tl.program_id(0) // HEAD_TILES, tl.program_id(1)
    head = tl.program_id(0) % HEAD_TILES * TILE + tl.arange(0, TILE)
    ours = head < HEADS
    length = tl.load(lengths + sequence)
    column = tl.arange(0, GROUPS)[:, None, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    group, rotated = tl.arange(0, GROUPS), tl.arange(0, ROTATED)
    at = q + sequence.to(tl.int64) * q_token
    q_latent = tl.load(
        at + head[None, :, None] * q_head + column, mask=ours[None, :, None], other=0.0
    )
    q_at = at + head[:, None] * q_head + GROUPS * GROUP
    q_rotated = tl.load(q_at + rotated[None, :], mask=ours[:, None], other=0.0)
    acc = tl.zeros([GROUPS, TILE, GROUP], tl.float32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    tiles = tl.cdiv(length, BLOCK)
    share = tl.cdiv(tiles, PARTS)
    for tile in tl.range(part * share, tl.minimum((part + 1) * share, tiles)):
        there = tile * BLOCK + tl.arange(0, BLOCK) < length
        pages = pages_of(table, tile, length, PAGE, BLOCK)
        rows = rows_of(pages, tile, page_stride, token_stride, PAGE, BLOCK)
        stored = tl.load(
            cache + rows[None, :, None] + column, mask=there[None, :, None], other=0.0
        ).to(q_latent.dtype)
        factor_at = scales + (rows // 4 + SCALES_AT)[None, :] + group[:, None]
        factor = tl.load(factor_at, mask=there[None, :], other=0.0)
        key_at = keys + (rows // 2 + KEY_AT)[:, None] + rotated[None, :]
        key = tl.load(key_at, mask=there[:, None], other=0.0)
        products = tl.dot(q_latent, tl.permute(stored, (0, 2, 1)))
        scores = tl.sum(products * factor[:, None, :], 0) + tl.dot(q_rotated, tl.trans(key))
        scores = tl.where(there[None, :], scores * (scale * LOG2_E), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.math.exp2(scores - anchor[:, None])
        shrink = tl.math.exp2(top - anchor)
        total = total * shrink + tl.sum(weights, 1)
        scaled = (weights[None, :, :] * factor[:, None, :]).to(q_latent.dtype)
        acc = tl.dot(scaled, stored, acc * shrink[None, :, None])
        top = new_top
    saw = total > 0.0
    result = acc / tl.where(saw, total, 1.0)[None, :, None]
    row = (part * tokens + sequence).to(tl.int64) * HEADS + head
    there_out = out + row[None, :, None] * (GROUPS * GROUP) + column
    tl.store(there_out, result.to(out.dtype.element_ty), mask=ours[None, :, None])
    if PARTS > 1:
        level = tl.where(saw, top + tl.math.log2(tl.where(saw, total, 1.0)), float("-inf"))
        tl.store(lse + row, level, mask=ours)


def decode(call: "Latents", out: Tensor, lse: Tensor, plan: Float8Plan = PLAN) -> None:
    """Fills out [parts, T, H, rank] and lse [parts, T, H]."""
    heads = call.q_THE.shape[1]
    kernel: Any = _float8_kernel
    kernel[(call.sequences * -(-heads // HEADS), len(out))](
        call.q_THE, *views(call.cache, call.q_THE.dtype), call.block_tables, call.lengths, out, lse,
        call.sequences, call.scale, call.block_tables.stride(0), call.q_THE.stride(0), call.q_THE.stride(1),
        call.cache.stride(0), call.cache.stride(1), **constants(call.layout, heads, call.page_size, plan, len(out)),
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip


def constants(
    layout: RowLayout, heads: int, page_size: int, plan: Float8Plan, parts: int
) -> dict[str, Any]:
    return dict(
        HEADS=heads, TILE=HEADS, ROTATED=layout.rotated, GROUP=layout.group, GROUPS=layout.scales,
        SCALES_AT=layout.scales_at, KEY_AT=layout.key_at, PAGE=page_size, BLOCK=plan.block, PARTS=parts,
    )  # fmt: skip
