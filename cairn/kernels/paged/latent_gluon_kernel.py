# pyrefly: ignore-errors
"""Decode over pages of latent rows in Gluon for sm_90: a warp that copies, and warps that compute on what it copied.

    copying warp      rows of the part by TMA into a ring of buffers: latents, and rotated keys beside them
    computing warps   scores of all heads, softmax, averages of the same latents

The compiler's own pipeline cannot hold a tile that is keys of one product and values of the next, so that each tile
waits for its copy; here copies run ahead. Up to 16 heads multiply by mma, tiles of 64 heads by wgmma. What is computed
and which parts there are is said by `latent_attention`. The cache must be finite everywhere: allocate it with zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from cairn.kernels.attention.attention_rings import Ring, barriers
from cairn.kernels.paged.paged_decode_gluon_kernel import copy_tile, pages_of_tile

NOTHING = gl.constexpr(-1.0e30)  # a finite minus infinity: no NaN from the difference of two
FEW = gl.constexpr(16)  # heads of a tile that mma takes
COLUMNS = gl.constexpr(
    128
)  # of the latents, which few heads multiply with at once: more would not fit the registers


@aggregate
class Part:
    """What one program computes: the tiles [first, last) of one sequence's rows."""

    sequence: gl.tensor
    first: gl.tensor
    last: gl.tensor
    length: gl.tensor
    row: gl.tensor  # of the output and the log-sum-exp: that of the first head

    @gluon.constexpr_function
    def __init__(self, sequence, first, last, length, row):
        self.sequence, self.first, self.last = sequence, first, last
        self.length, self.row = length, row


@gluon.jit
def _copy(view, latents, rotated, tables, part, table_stride, page_rows, RANK: gl.constexpr, ROTATED: gl.constexpr,
          PAGE: gl.constexpr, BOX: gl.constexpr, BLOCK: gl.constexpr):  # fmt: skip
    table = tables + part.sequence.to(gl.int64) * table_stride
    pages = pages_of_tile(table, part.first, part.length, PAGE, BLOCK)
    for tile in range(part.first, part.last):
        # A tile before they are needed.
        next_pages = pages_of_tile(table, tile + 1, part.length, PAGE, BLOCK)
        step = tile - part.first
        copy_tile(view, rotated, step, pages, tile, part.length, 0, RANK, page_rows, ROTATED, PAGE, BOX,
                  BLOCK)  # fmt: skip
        copy_tile(
            view, latents, step, pages, tile, part.length, 0, 0, page_rows, RANK, PAGE, BOX, BLOCK
        )
        pages = next_pages


@gluon.jit
def _softmax(scores, top, total, key0, length, scale_log2, BLOCK: gl.constexpr):
    """Weights of a tile, and how much what was summed before shrinks."""
    layout: gl.constexpr = scores.type.layout
    key = key0 + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    scores = gl.where((key < length)[None, :], scores * scale_log2, NOTHING)
    new_top = gl.maximum(top, gl.max(scores, 1))
    weights = gl.exp2(scores - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    return weights, shrink, new_top, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _compute_few(q, out, lse, latents, rotated, part, scale_log2, q_head, HEADS: gl.constexpr, RANK: gl.constexpr,
                 ROTATED: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    row = gl.arange(0, FEW, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    narrow = gl.arange(0, ROTATED, layout=gl.SliceLayout(0, layout))
    ours = (row < HEADS)[:, None]
    at = q + (row * q_head)[:, None]
    q_rotated = gl.convert_layout(gl.load(at + RANK + narrow[None, :], mask=ours, other=0.0), left)
    q_latent = ()
    acc = ()
    for i in gl.static_range(RANK // COLUMNS):
        some = gl.load(at + i * COLUMNS + column[None, :], mask=ours, other=0.0)
        q_latent = q_latent + (gl.convert_layout(some, left),)  # noqa: RUF005
        acc = acc + (gl.zeros([FEW, COLUMNS], gl.float32, layout),)  # noqa: RUF005
    top = gl.full([FEW], NOTHING, gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([FEW], gl.float32, gl.SliceLayout(1, layout))
    for tile in range(part.first, part.last):
        step = tile - part.first
        rotated.wait(step)
        scores = mma_v2(
            q_rotated,
            rotated.at(step).permute((1, 0)).load(right),
            gl.zeros([FEW, BLOCK], gl.float32, layout),
        )
        latents.wait(step)
        for i in gl.static_range(RANK // COLUMNS):
            keys = latents.at(step).slice(i * COLUMNS, COLUMNS, 1).permute((1, 0)).load(right)
            scores = mma_v2(q_latent[i], keys, scores)
        weights, shrink, top, total = _softmax(
            scores, top, total, tile * BLOCK, part.length, scale_log2, BLOCK
        )
        weights = gl.convert_layout(weights.to(q.dtype.element_ty), left)
        added = ()
        for i in gl.static_range(RANK // COLUMNS):
            values = latents.at(step).slice(i * COLUMNS, COLUMNS, 1).load(right)
            added = added + (mma_v2(weights, values, acc[i] * shrink[:, None]),)  # noqa: RUF005
        acc = added
        gl.thread_barrier()  # all warps have read the buffers
        rotated.release(step)
        latents.release(step)
    saw = total > 0.0
    share = 1.0 / gl.where(saw, total, 1.0)
    there = out + (part.row + row)[:, None] * RANK + column[None, :]
    for i in gl.static_range(RANK // COLUMNS):
        gl.store(there + i * COLUMNS, (acc[i] * share[:, None]).to(out.dtype.element_ty), mask=ours)
    if PARTS > 1:
        level = gl.where(saw, top + gl.log2(gl.where(saw, total, 1.0)), -float("inf"))
        gl.store(lse + part.row + row, level, mask=row < HEADS)


@gluon.jit
def _queries(q, q_head, COUNT: gl.constexpr, WIDTH: gl.constexpr, HEADS: gl.constexpr):
    """Rows of a tile of heads in shared memory, as wgmma takes them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    row = gl.arange(0, COUNT, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    values = gl.load(q + (row * q_head)[:, None] + column[None, :])
    return gl.allocate_shared_memory(q.dtype.element_ty, [COUNT, WIDTH], shared, values)


@gluon.jit
def _compute_many(q_latent, q_rotated, out, lse, latents, rotated, part, scale_log2, RANK: gl.constexpr,
                  BLOCK: gl.constexpr, PARTS: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    # Two warpgroups share the columns: of the scores, and of the latents that they sum.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK // 2, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    acc = gl.zeros([TILE, RANK], gl.float32, layout)
    top = gl.full([TILE], NOTHING, gl.float32, gl.SliceLayout(1, narrow))
    totals = gl.zeros([TILE, BLOCK], gl.float32, narrow)  # summed over a row at the end
    nothing = gl.zeros([TILE, BLOCK], gl.float32, narrow)
    for tile in range(part.first, part.last):
        step = tile - part.first
        rotated.wait(step)
        scores = warpgroup_mma(
            q_rotated, rotated.at(step).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        latents.wait(step)
        scores = warpgroup_mma(q_latent, latents.at(step).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, (scores,))
        key = tile * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, narrow))
        scores = gl.where((key < part.length)[None, :], scores * scale_log2, NOTHING)
        new_top = gl.maximum(top, gl.max(scores, 1))
        weights = gl.exp2(scores - new_top[:, None])
        shrink = gl.exp2(top - new_top)
        totals = totals * shrink[:, None] + weights
        top = new_top
        weights = gl.convert_layout(weights.to(q_latent.dtype), left)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, layout))[:, None]
        acc = warpgroup_mma(weights, latents.at(step), acc, is_async=True)
        acc, weights = warpgroup_mma_wait(0, (acc, weights))
        gl.thread_barrier()  # both warpgroups have read the buffers
        rotated.release(step)
        latents.release(step)
    total = gl.sum(totals, 1)
    saw = total > 0.0
    share = gl.convert_layout(1.0 / gl.where(saw, total, 1.0), gl.SliceLayout(1, layout))
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, RANK, layout=gl.SliceLayout(0, layout))
    there = out + (part.row + row)[:, None] * RANK + column[None, :]
    gl.store(there, (acc * share[:, None]).to(out.dtype.element_ty))
    if PARTS > 1:
        level = gl.where(saw, top + gl.log2(gl.where(saw, total, 1.0)), -float("inf"))
        gl.store(lse + part.row + gl.arange(0, TILE, layout=gl.SliceLayout(1, narrow)), level)


@gluon.jit
def latent_decode_kernel(
    view, q, tables, lengths, out, lse, tokens, scale_log2, table_stride, q_token, q_head, page_rows,
    HEADS: gl.constexpr, TILE: gl.constexpr, RANK: gl.constexpr, ROTATED: gl.constexpr, PAGE: gl.constexpr,
    BLOCK: gl.constexpr, PARTS: gl.constexpr, BUFFERS: gl.constexpr, WARPS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """TILE heads of one sequence over one part of its rows; the parts lie behind each other in the grid."""
    BOX: gl.constexpr = view.block_type.shape[0]
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    HEAD_TILES: gl.constexpr = (HEADS + TILE - 1) // TILE
    place = gl.program_id(0)
    index = place // (tokens * HEAD_TILES)
    sequence = place // HEAD_TILES % tokens
    head = place % HEAD_TILES * TILE
    length = gl.load(lengths + sequence)
    tiles = gl.cdiv(length, BLOCK)
    each = gl.cdiv(tiles, PARTS)
    first = gl.minimum(index * each, tiles)
    last = gl.minimum(first + each, tiles)
    row = (index * tokens + sequence).to(gl.int64) * HEADS + head
    part = Part(sequence, first, last, length, row)
    q += sequence.to(gl.int64) * q_token + head * q_head
    memory = gl.allocate_shared_memory(view.dtype, [BUFFERS, BLOCK, RANK], shared)
    beside = gl.allocate_shared_memory(view.dtype, [BUFFERS, BLOCK, ROTATED], shared)
    latents = Ring(memory, barriers(BUFFERS, 1), barriers(BUFFERS, 1), BUFFERS)
    rotated = Ring(beside, barriers(BUFFERS, 1), barriers(BUFFERS, 1), BUFFERS)
    if TILE == FEW:
        gl.warp_specialize([
            (_compute_few, (q, out, lse, latents, rotated, part, scale_log2, q_head, HEADS, RANK, ROTATED, BLOCK,
                            PARTS, WARPS)),
            (_copy, (view, latents, rotated, tables, part, table_stride, page_rows, RANK, ROTATED, PAGE, BOX, BLOCK)),
        ], [1], [REGISTERS])  # fmt: skip
    else:
        q_latent = _queries(q, q_head, TILE, RANK, HEADS)
        q_rotated = _queries(q + RANK, q_head, TILE, ROTATED, HEADS)
        fence_async_shared()
        gl.warp_specialize([
            (_compute_many, (q_latent, q_rotated, out, lse, latents, rotated, part, scale_log2, RANK, BLOCK, PARTS,
                             TILE)),
            (_copy, (view, latents, rotated, tables, part, table_stride, page_rows, RANK, ROTATED, PAGE, BOX, BLOCK)),
        ], [1], [REGISTERS])  # fmt: skip
