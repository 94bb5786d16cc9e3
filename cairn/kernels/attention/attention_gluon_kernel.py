# pyrefly: ignore-errors
"""Attention forward in Gluon for sm_90: a warp that copies, two warpgroups that compute, one program per SM.

    copying warp     Q of the next tile, K and V of the next blocks, by TMA into shared memory
    warpgroups 0, 1  64 queries each: scores of block j on the tensor cores, and behind them weights x values of block
                     j - 1; while those run, the softmax of block j
    ping-pong        the two take turns in issuing products, so that one's softmax runs under the other's products

All walk over the same list of tiles, longest first; it goes round the programs like a snake, so that they end at about
the same time. Equal lengths need no list; for ragged ones a small kernel writes it (attention_schedule). Q has two
buffers, so the copying warp is a tile ahead.

Takes 16-bit numbers, D 64 or 128, as many keys as queries, and sinks. Window and soft-cap: plain Triton.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from cairn.kernels.attention.attention_rings import (
    HALF,
    TILE,
    Ring,
    barriers,
    copy_rows,
    make_ring,
    make_tile_schedule,
)

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
NOTHING = gl.constexpr(-1.0e30)


@aggregate
class Shared:
    q0: Ring  # of warpgroup 0
    q1: Ring
    k: Ring
    v: Ring
    turn: gl.shared_memory_descriptor  # barriers: whose turn it is to issue products

    @gluon.constexpr_function
    def __init__(self, q0, q1, k, v, turn):
        self.q0, self.q1, self.k, self.v, self.turn = q0, q1, k, v, turn


@gluon.jit
def _blocks(row0, length, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many blocks of keys a tile sees."""
    if CAUSAL:
        return gl.cdiv(gl.minimum(length, row0 + TILE), BLOCK_N)
    else:
        return gl.cdiv(length, BLOCK_N)


@gluon.jit
def _copy(q_desc, k_desc, v_desc, shared, work, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
          CAUSAL: gl.constexpr, RAGGED: gl.constexpr):  # fmt: skip
    step = 0
    for turn in range(work.rounds()):
        tile = work.tile(turn)
        for half in gl.static_range(2):
            if half == 0:
                q = shared.q0
            else:
                q = shared.q1
            q.begin(turn, q_desc.block_type.nbytes)
            at = [tile.start + tile.row0 + half * HALF, tile.head * D]
            tma.async_copy_global_to_shared(q_desc, at, q.filled(turn), q.at(turn))
        blocks = _blocks(tile.row0, tile.length, BLOCK_N, CAUSAL)
        column = tile.head // GROUP * D
        for j in range(blocks):  # from the diagonal to the first keys
            row = (blocks - 1 - j) * BLOCK_N
            shared.k.begin(step, k_desc.block_type.nbytes)
            copy_rows(k_desc, tile, row, column, shared.k.filled(step), shared.k.at(step), RAGGED)
            shared.v.begin(step, v_desc.block_type.nbytes)
            copy_rows(v_desc, tile, row, column, shared.v.filled(step), shared.v.at(step), RAGGED)
            step += 1


@gluon.jit
def _take_turn(shared, turns, ME: gl.constexpr, PING_PONG: gl.constexpr):
    if PING_PONG:
        mbarrier.wait(shared.turn.index(ME), turns % 2 ^ (1 - ME))


@gluon.jit
def _pass_turn(shared, turns, ME: gl.constexpr, PING_PONG: gl.constexpr):
    if PING_PONG:
        mbarrier.arrive(shared.turn.index(1 - ME), count=1)
    return turns + 1


@gluon.jit
def _softmax(
    scores, top, total, scale_log2, rows, key0, length, MASK: gl.constexpr, CAUSAL: gl.constexpr
):
    """Weights of a block, the running maximum and sum, and by how much all before has to shrink."""
    layout: gl.constexpr = scores.type.layout
    if MASK:
        keys = key0 + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))
        seen = (keys < length)[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None])
        scores = gl.where(seen, scores, NOTHING)
    new_top = gl.maximum(top, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    return weights, new_top, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _step(acc, weights, top, total, step, turns, more, q, shared, rows, key0, length, scale_log2, D: gl.constexpr,
          BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr, ME: gl.constexpr,
          PING_PONG: gl.constexpr):  # fmt: skip
    """Scores and softmax of this block; values of the one before. This block's keys have arrived already."""
    score_layout: gl.constexpr = rows.type.layout.parent
    acc_layout: gl.constexpr = acc.type.layout
    weight_layout: gl.constexpr = weights.type.layout
    k = shared.k.at(step).reshape([BLOCK_N, D])
    v = shared.v.at(step - 1).reshape([BLOCK_N, D])
    nothing = gl.zeros([HALF, BLOCK_N], gl.float32, score_layout)
    _take_turn(shared, turns, ME, PING_PONG)
    scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    shared.v.wait(step - 1)
    acc = warpgroup_mma(weights, v, acc, is_async=True)
    turns = _pass_turn(shared, turns, ME, PING_PONG)
    scores = warpgroup_mma_wait(1, (scores,))
    shared.k.release(step)
    exact, top, total, shrink = _softmax(
        scores, top, total, scale_log2, rows, key0, length, MASK, CAUSAL
    )
    # The spin loop of this wait is a boundary between basic blocks: without one, ptxas waits for the second product
    # before the softmax instead of after it.
    shared.k.wait(step + 1, more)
    acc, weights = warpgroup_mma_wait(0, (acc, weights))
    shared.v.release(step - 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc_layout))[:, None]
    weights = gl.convert_layout(exact.to(weights.dtype), weight_layout)
    return acc, weights, top, total, step + 1, turns


@gluon.jit
def store_rows(
    out, values, staging, release, tile, row0, head, HEADS: gl.constexpr, D: gl.constexpr
):
    """Results of a warpgroup to global memory in rows of 16 bytes, through a buffer that nobody else uses now."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    staging.store(values)
    gl.thread_barrier()
    result = staging.load(layout)
    fence_async_shared()  # these accesses come before the copying warp's next ones
    gl.thread_barrier()
    mbarrier.arrive(release, count=1)
    rows = row0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    place = ((tile.start + rows).to(gl.int64) * HEADS + head)[:, None] * D + columns[None, :]
    gl.store(out + place, result, mask=(rows < tile.length)[:, None])


@gluon.jit
def _compute(out, lse, sinks, shared, work, tokens, scale_log2, D: gl.constexpr, BLOCK_N: gl.constexpr,
             CAUSAL: gl.constexpr, SINKS: gl.constexpr, PING_PONG: gl.constexpr, ME: gl.constexpr):  # fmt: skip
    if ME == 0:
        q_ring = shared.q0
    else:
        q_ring = shared.q1
    dtype: gl.constexpr = q_ring.memory.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    step = 0
    turns = 0
    tile = work.tile(0)
    for turn in range(work.rounds()):
        next_tile = work.tile(turn + 1)  # known by the time it is needed
        blocks = _blocks(tile.row0, tile.length, BLOCK_N, CAUSAL)
        length, head = tile.length, tile.head
        row0 = tile.row0 + ME * HALF
        rows = row0 + gl.arange(0, HALF, layout=row_layout)
        if SINKS:
            top = (
                gl.full([HALF], 0.0, gl.float32, row_layout)
                + gl.load(sinks + head).to(gl.float32) * LOG2_E
            )
            total = gl.full([HALF], 1.0, gl.float32, row_layout)
        else:
            top = gl.full([HALF], NOTHING, gl.float32, row_layout)
            total = gl.zeros([HALF], gl.float32, row_layout)
        acc = gl.zeros([HALF, D], gl.float32, acc_layout)
        nothing = gl.zeros([HALF, BLOCK_N], gl.float32, score_layout)

        q = q_ring.at(turn)
        k = shared.k.at(step).reshape([BLOCK_N, D])
        q_ring.wait(turn)
        shared.k.wait(step)
        _take_turn(shared, turns, ME, PING_PONG)
        scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        turns = _pass_turn(shared, turns, ME, PING_PONG)
        scores = warpgroup_mma_wait(0, (scores,))
        shared.k.release(step)
        key0 = (blocks - 1) * BLOCK_N
        exact, top, total, _ = _softmax(
            scores, top, total, scale_log2, rows, key0, length, True, CAUSAL
        )
        weights = gl.convert_layout(exact.to(dtype), weight_layout)
        step += 1
        shared.k.wait(step, blocks > 1)
        masked = 1
        if CAUSAL and BLOCK_N < TILE:  # more blocks on the diagonal
            masked = gl.minimum(blocks, TILE // BLOCK_N)
            for j in range(1, masked):
                acc, weights, top, total, step, turns = _step(
                    acc, weights, top, total, step, turns, j + 1 < blocks, q, shared, rows, key0 - j * BLOCK_N, length,
                    scale_log2, D, BLOCK_N, CAUSAL, True, ME, PING_PONG)  # fmt: skip
        for j in range(masked, blocks):
            acc, weights, top, total, step, turns = _step(
                acc, weights, top, total, step, turns, j + 1 < blocks, q, shared, rows, key0 - j * BLOCK_N, length,
                scale_log2, D, BLOCK_N, CAUSAL, False, ME, PING_PONG)  # fmt: skip
        shared.v.wait(step - 1)
        acc = warpgroup_mma(
            weights, shared.v.at(step - 1).reshape([BLOCK_N, D]), acc, is_async=True
        )
        acc, weights = warpgroup_mma_wait(0, (acc, weights))
        shared.v.release(step - 1)

        gl.store(
            lse + head.to(gl.int64) * tokens + tile.start + rows,
            (top + gl.log2(total)) * LN_2,
            mask=rows < length,
        )
        share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, acc_layout))
        free = q_ring.free.index(turn % q_ring.SIZE)
        store_rows(out, (acc * share[:, None]).to(dtype), q, free, tile, row0, head, work.HEADS, D)
        tile = next_tile


@gluon.jit
def clear_behind(out, end, tokens, HEADS: gl.constexpr, D: gl.constexpr):
    """Rows behind the last sequence are 0."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    columns = gl.arange(0, D, layout=layout)
    zeros = gl.zeros([D], out.dtype.element_ty, layout)
    for row in range(end + gl.program_id(0), tokens, gl.num_programs(0)):
        for head in range(HEADS):
            gl.store(out + (row.to(gl.int64) * HEADS + head) * D + columns, zeros)


@gluon.jit
def _clear_levels(lse, sinks, end, tokens, HEADS: gl.constexpr, SINKS: gl.constexpr):
    """They see nothing but the sinks."""
    for row in range(end + gl.program_id(0), tokens, gl.num_programs(0)):
        for head in range(HEADS):
            level = -float("inf")
            if SINKS:
                level = gl.load(sinks + head).to(gl.float32)
            gl.store(lse + gl.to_tensor(head).to(gl.int64) * tokens + row, level)


@gluon.jit(do_not_specialize=["sequences", "tokens", "length"])
def attention_kernel(q_desc, k_desc, v_desc, out, lse, sinks, tiles, cu, sequences, tokens, length, scale_log2,
                     HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, D: gl.constexpr,
                     BLOCK_N: gl.constexpr, BUFFERS: gl.constexpr, Q_BUFFERS: gl.constexpr, DENSE: gl.constexpr,
                     RAGGED: gl.constexpr, CAUSAL: gl.constexpr, SINKS: gl.constexpr, PING_PONG: gl.constexpr,
                     REGISTERS: gl.constexpr):  # fmt: skip
    if not DENSE:
        end = gl.load(cu + sequences)
        clear_behind(out, end, tokens, HEADS, D)
        _clear_levels(lse, sinks, end, tokens, HEADS, SINKS)
    work = make_tile_schedule(tiles, sequences, length, HEADS, SECTION, DENSE)
    q0, q1 = make_ring(q_desc, Q_BUFFERS, 1), make_ring(q_desc, Q_BUFFERS, 1)
    k, v = make_ring(k_desc, BUFFERS, 2), make_ring(v_desc, BUFFERS, 2)
    shared = Shared(q0, q1, k, v, barriers(2, 1) if PING_PONG else k.full)
    gl.warp_specialize([
        (_compute, (out, lse, sinks, shared, work, tokens, scale_log2, D, BLOCK_N, CAUSAL, SINKS, PING_PONG, 0)),
        (_compute, (out, lse, sinks, shared, work, tokens, scale_log2, D, BLOCK_N, CAUSAL, SINKS, PING_PONG, 1)),
        (_copy, (q_desc, k_desc, v_desc, shared, work, GROUP, D, BLOCK_N, CAUSAL, RAGGED)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
