# pyrefly: ignore-errors
"""Gradients of queries in Gluon for sm_90: a tile of 128 queries at a time, as in the forward pass.

A warp copies, two warpgroups compute 64 queries each. Scores are [queries, keys], so that slopes are the left operand
of the next product as they come, in registers:

    s = q k^T and dp = dout v^T of block j, dq += ds k of block j - 1;    while those run, p = exp(s - lse) of block j;
    then ds = p (dp - delta)

lse and delta come from `rows_kernel` with a factor: see attention_gluon_backward.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from cairn.kernels.attention.attention_gluon_kernel import LOG2_E, NOTHING, clear_behind, store_rows
from cairn.kernels.attention.attention_rings import (
    HALF,
    TILE,
    Ring,
    copy_rows,
    make_ring,
    make_tile_schedule,
)

STEP = gl.constexpr(64)  # keys of a block


@aggregate
class QueriesShared:
    q0: Ring  # of warpgroup 0
    q1: Ring
    dout0: Ring
    dout1: Ring
    k: Ring
    v: Ring

    @gluon.constexpr_function
    def __init__(self, q0, q1, dout0, dout1, k, v):
        self.q0, self.q1, self.dout0, self.dout1, self.k, self.v = q0, q1, dout0, dout1, k, v


@gluon.jit
def _blocks(tile, CAUSAL: gl.constexpr):
    """How many blocks of keys a tile of queries sees."""
    if CAUSAL:
        return gl.cdiv(gl.minimum(tile.length, tile.row0 + TILE), STEP)
    else:
        return gl.cdiv(tile.length, STEP)


@gluon.jit
def _copy_for_queries(q_desc, k_desc, v_desc, dout_desc, shared, work, GROUP: gl.constexpr, D: gl.constexpr,
                      CAUSAL: gl.constexpr, RAGGED: gl.constexpr):  # fmt: skip
    step = 0
    for turn in range(work.rounds()):
        tile = work.tile(turn)
        for half in gl.static_range(2):
            if half == 0:
                q, dout = shared.q0, shared.dout0
            else:
                q, dout = shared.q1, shared.dout1
            at = [tile.start + tile.row0 + half * HALF, tile.head * D]
            q.begin(turn, q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, at, q.filled(turn), q.at(turn))
            dout.begin(turn, dout_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(dout_desc, at, dout.filled(turn), dout.at(turn))
        blocks = _blocks(tile, CAUSAL)
        column = tile.head // GROUP * D
        for j in range(blocks):  # from the diagonal to the first keys
            row = (blocks - 1 - j) * STEP
            shared.k.begin(step, k_desc.block_type.nbytes)
            copy_rows(k_desc, tile, row, column, shared.k.filled(step), shared.k.at(step), RAGGED)
            shared.v.begin(step, v_desc.block_type.nbytes)
            copy_rows(v_desc, tile, row, column, shared.v.filled(step), shared.v.at(step), RAGGED)
            step += 1


@gluon.jit
def _queries_step(
    acc, slopes, step, more, q, dout, shared, level, share, scale_log2, D: gl.constexpr
):
    """Scores and slopes of this block; dq of the one before. This block's keys have arrived already."""
    score_layout: gl.constexpr = level.type.layout.parent
    slope_layout: gl.constexpr = slopes.type.layout
    k = shared.k.at(step).reshape([STEP, D])
    v = shared.v.at(step).reshape([STEP, D])
    nothing = gl.zeros([HALF, STEP], gl.float32, score_layout)
    scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    shared.v.wait(step)
    fresh = warpgroup_mma(dout, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
    acc = warpgroup_mma(slopes, shared.k.at(step - 1).reshape([STEP, D]), acc, is_async=True)
    scores = warpgroup_mma_wait(2, (scores,))
    weights = gl.exp2(scores * scale_log2 + level[:, None])
    shared.k.wait(
        step + 1, more
    )  # also a boundary between basic blocks, which keeps ptxas from waiting before the exp2
    fresh = warpgroup_mma_wait(1, (fresh,))
    shared.v.release(step)
    fresh = weights * (fresh + share[:, None])
    acc, slopes = warpgroup_mma_wait(0, (acc, slopes))
    shared.k.release(step - 1)
    slopes = gl.convert_layout(fresh.to(slopes.dtype), slope_layout)
    return acc, slopes, step + 1


@gluon.jit
def _compute_queries(dq, level, delta, stride_level, shared, work, scale_log2, D: gl.constexpr, ROW: gl.constexpr,
                     CAUSAL: gl.constexpr, ME: gl.constexpr):  # fmt: skip
    if ME == 0:
        q_ring, dout_ring = shared.q0, shared.dout0
    else:
        q_ring, dout_ring = shared.q1, shared.dout1
    dtype: gl.constexpr = q_ring.memory.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    slope_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    step = 0
    tile = work.tile(0)
    for turn in range(work.rounds()):
        next_tile = work.tile(turn + 1)  # known by the time it is needed
        blocks = _blocks(tile, CAUSAL)
        row0 = tile.row0 + ME * HALF
        rows = gl.arange(0, HALF, layout=row_layout)
        numbers = tile.head.to(gl.int64) * stride_level + tile.padded + row0 + rows
        height = gl.load(level + numbers) * scale_log2
        share = gl.load(delta + numbers)
        acc = gl.zeros([HALF, D], gl.float32, acc_layout)
        nothing = gl.zeros([HALF, STEP], gl.float32, score_layout)
        q = q_ring.at(turn)
        dout = dout_ring.at(turn)
        q_ring.wait(turn)
        dout_ring.wait(turn)
        # The last block comes after all queries of warpgroup 0.
        if CAUSAL and ME == 0:  # noqa: SIM102  known to the compiler; the rest is not
            if blocks > tile.row0 // STEP + 1:
                shared.k.wait(step)
                shared.k.release(step)
                shared.v.wait(step)
                shared.v.release(step)
                step += 1
                blocks -= 1

        k = shared.k.at(step).reshape([STEP, D])
        v = shared.v.at(step).reshape([STEP, D])
        shared.k.wait(step)
        scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        shared.v.wait(step)
        fresh = warpgroup_mma(dout, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
        exponents = warpgroup_mma_wait(1, (scores,)) * scale_log2 + height[:, None]
        keys = gl.arange(0, STEP, layout=gl.SliceLayout(0, score_layout))
        if CAUSAL:  # the same keys as queries
            seen = keys[None, :] <= rows[:, None]
        else:
            seen = (keys < tile.length - (blocks - 1) * STEP)[None, :]
        weights = gl.exp2(gl.where(seen, exponents, NOTHING))
        shared.k.wait(step + 1, blocks > 1)
        fresh = warpgroup_mma_wait(0, (fresh,))
        shared.v.release(step)
        fresh = weights * (fresh + share[:, None])
        slopes = gl.convert_layout(fresh.to(dtype), slope_layout)
        step += 1
        for j in range(1, blocks):
            acc, slopes, step = _queries_step(
                acc, slopes, step, j + 1 < blocks, q, dout, shared, height, share, scale_log2, D)  # fmt: skip
        acc = warpgroup_mma(slopes, shared.k.at(step - 1).reshape([STEP, D]), acc, is_async=True)
        acc, slopes = warpgroup_mma_wait(0, (acc, slopes))
        shared.k.release(step - 1)
        dout_ring.release(turn)
        free = q_ring.free.index(turn % q_ring.SIZE)
        acc = acc * (scale_log2 / LOG2_E)
        store_rows(dq, acc.to(dtype), q, free, tile, row0, tile.head, ROW, D)
        tile = next_tile


@gluon.jit
def queries_kernel(q_desc, k_desc, v_desc, dout_desc, level, delta, dq, tiles, cu, sequences, tokens, stride_level,
                   scale_log2, HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, ROW: gl.constexpr,
                   D: gl.constexpr, BUFFERS: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
                   REGISTERS: gl.constexpr):  # fmt: skip
    """As many programs as there are SMs, each for many tiles of 128 queries. A block of keys is used for two steps.

    A row of dq has ROW heads, of which the first HEADS are its own.
    """
    clear_behind(dq, gl.load(cu + sequences), tokens, ROW, D)
    work = make_tile_schedule(tiles, 0, 0, HEADS, SECTION, False)
    shared = QueriesShared(
        make_ring(q_desc, 2, 1), make_ring(q_desc, 2, 1), make_ring(dout_desc, 2, 1), make_ring(dout_desc, 2, 1),
        make_ring(k_desc, BUFFERS + 1, 2), make_ring(v_desc, BUFFERS, 2))  # fmt: skip
    gl.warp_specialize([
        (_compute_queries, (dq, level, delta, stride_level, shared, work, scale_log2, D, ROW, CAUSAL, 0)),
        (_compute_queries, (dq, level, delta, stride_level, shared, work, scale_log2, D, ROW, CAUSAL, 1)),
        (_copy_for_queries, (q_desc, k_desc, v_desc, dout_desc, shared, work, GROUP, D, CAUSAL, RAGGED)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
