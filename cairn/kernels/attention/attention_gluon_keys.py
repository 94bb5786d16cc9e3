# pyrefly: ignore-errors
"""Gradients of keys and values in Gluon for sm_90: one program per tile of 128 keys, over all heads of its group.

A warp copies, two warpgroups compute 64 keys each. Scores are [keys, queries], so that weights and slopes are the left
operand of the next product as they come, in registers:

    s = k q^T and dp = v dout^T;    while dp runs, p = exp(s - lse);    ds = p (dp - delta);    dv += p dout, dk += ds q

While one warpgroup computes exponentials, the other has the tensor cores. lse and delta come from `rows_kernel` with a
factor (see attention_gluon_backward): they are where the sums s and dp start. Each sequence starts a tile of its own
there, and rows behind its end weigh nothing. dk and dv go into one tensor [T, ROW, C], from its head FIRST on.

Where lengths are equal, the slopes ds can be kept for the queries' gradients, which then take one product in place of
three: see attention_gluon_slopes, whose order of blocks `slopes_row` knows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
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
    buffers,
    copy_rows,
    load_tile,
    make_ring,
    make_tile_schedule,
)

STEP = gl.constexpr(64)  # queries of a block


@aggregate
class KeysShared:
    k0: Ring  # of warpgroup 0
    k1: Ring
    v0: Ring
    v1: Ring
    q: Ring  # its barriers are those of the next three, too
    dout: gl.shared_memory_descriptor
    level: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    slopes: gl.shared_memory_descriptor  # a block of each warpgroup on its way out

    @gluon.constexpr_function
    def __init__(self, k0, k1, v0, v1, q, dout, level, delta, slopes):
        self.k0, self.k1, self.v0, self.v1 = k0, k1, v0, v1
        self.q, self.dout, self.level, self.delta, self.slopes = q, dout, level, delta, slopes


@gluon.jit
def _key0(tile):
    """Work is listed by queries, of which the last see most; of the keys the first are seen by most."""
    return (gl.cdiv(tile.length, TILE) - 1) * TILE - tile.row0


@gluon.jit
def _first_block(key0, CAUSAL: gl.constexpr):
    if CAUSAL:
        return key0 // STEP
    else:
        return 0


@gluon.jit
def slopes_row(sequence_and_head, blocks, key_block, query_block, CAUSAL: gl.constexpr):
    """Where a block of slopes begins, in rows of STEP numbers: all that see a block of keys lie in a row."""
    if CAUSAL:
        first = sequence_and_head * (blocks * (blocks + 1) // 2)
        first += key_block * blocks - key_block * (key_block - 1) // 2 - key_block
    else:
        first = sequence_and_head * (blocks * blocks) + key_block * blocks
    return (first + query_block) * STEP


@gluon.jit
def _first_slopes(entry, head, HEADS: gl.constexpr, CAUSAL: gl.constexpr, ME: gl.constexpr):
    """Where the first block of this warpgroup goes."""
    tile = load_tile(entry, head)
    key_block = _key0(tile) // HALF + ME
    first = key_block
    if not CAUSAL:
        first = 0
    world = tile.start // tile.length * HEADS + head
    return slopes_row(world, gl.cdiv(tile.length, STEP), key_block, first, CAUSAL)


@gluon.jit
def _copy_for_keys(q_desc, k_desc, v_desc, dout_desc, level_desc, delta_desc, shared, entry, kv_head,
                   GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr):  # fmt: skip
    numbers_bytes: gl.constexpr = level_desc.block_type.nbytes + delta_desc.block_type.nbytes
    step_bytes: gl.constexpr = (
        q_desc.block_type.nbytes + dout_desc.block_type.nbytes + numbers_bytes
    )
    tile = load_tile(entry, kv_head)
    key0 = _key0(tile)
    for half in gl.static_range(2):
        if half == 0:
            k, v = shared.k0, shared.v0
        else:
            k, v = shared.k1, shared.v1
        at = [tile.start + key0 + half * HALF, kv_head * D]
        k.begin(0, k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, at, k.filled(0), k.at(0))
        v.begin(0, v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, at, v.filled(0), v.at(0))
    step = 0
    for member in range(GROUP):
        head = kv_head * GROUP + member
        for block in range(_first_block(key0, CAUSAL), gl.cdiv(tile.length, STEP)):
            row = block * STEP
            place = step % shared.q.SIZE
            full = shared.q.filled(step)
            shared.q.begin(step, step_bytes)
            copy_rows(q_desc, tile, row, head * D, full, shared.q.at(step), RAGGED)
            copy_rows(dout_desc, tile, row, head * D, full, shared.dout.index(place), RAGGED)
            numbers = [head, tile.padded + row]
            tma.async_copy_global_to_shared(level_desc, numbers, full, shared.level.index(place))
            tma.async_copy_global_to_shared(delta_desc, numbers, full, shared.delta.index(place))
            step += 1


@gluon.jit
def _keys_step(acc_k, acc_v, step, k, v, shared, scale_log2, slopes_desc, slopes_at, D: gl.constexpr,
               DIAGONAL: gl.constexpr, SLOPES: gl.constexpr, ME: gl.constexpr):  # fmt: skip
    """What a block of queries gives to the keys and values of this warpgroup.

    `slopes_at`: where a block of step 0 would go. A row of its own that moves on would take one register too many.
    """
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    acc_layout: gl.constexpr = acc_k.type.layout
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    place = step % shared.q.SIZE
    q = shared.q.at(step).reshape([STEP, D])
    dout = shared.dout.index(place).reshape([STEP, D])
    nothing = gl.zeros([HALF, STEP], gl.float32, score_layout)
    shared.q.wait(step)
    # What has to be subtracted is where the sums start, so it needs no registers of its own. The wait waits for
    # nothing: it keeps both from being set while a product runs, which would make ptxas serialise them (C7517).
    scores = nothing + shared.level.index(place).load(score_layout)
    slopes = nothing + shared.delta.index(place).load(score_layout)
    scores, slopes = warpgroup_mma_wait(0, (scores, slopes))
    scores = warpgroup_mma(k, q.permute((1, 0)), scores, is_async=True)
    slopes = warpgroup_mma(v, dout.permute((1, 0)), slopes, is_async=True)
    exponents = warpgroup_mma_wait(1, (scores,)) * scale_log2
    if DIAGONAL:  # the same keys as queries
        keys = gl.arange(0, HALF, layout=gl.SliceLayout(1, score_layout))
        rows = gl.arange(0, STEP, layout=gl.SliceLayout(0, score_layout))
        exponents = gl.where(keys[:, None] <= rows[None, :], exponents, NOTHING)
    weights = gl.exp2(exponents)
    shared.q.wait(
        step
    )  # has been: a boundary between basic blocks, which keeps ptxas from waiting before the exp2
    slopes = (weights * warpgroup_mma_wait(0, (slopes,))).to(k.dtype)
    weights = gl.convert_layout(weights.to(k.dtype), weight_layout)
    if SLOPES:
        staging = shared.slopes.index(ME)
        tma.store_wait(0)  # the last block has left
        gl.thread_barrier()
        staging.store(slopes)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(slopes_desc, [slopes_at + step * STEP, 0], staging)
    slopes = gl.convert_layout(slopes, weight_layout)
    acc_v = warpgroup_mma(weights, dout, acc_v, is_async=True)
    acc_k = warpgroup_mma(slopes, q, acc_k, is_async=True)
    acc_v, acc_k, weights, slopes = warpgroup_mma_wait(0, (acc_v, acc_k, weights, slopes))
    shared.q.release(step)
    return acc_k, acc_v, step + 1


@gluon.jit
def _compute_keys(dkv, slopes_desc, shared, entry, kv_head, scale_log2, KV_HEADS: gl.constexpr, FIRST: gl.constexpr,
                  ROW: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, SLOPES: gl.constexpr,
                  ME: gl.constexpr):  # fmt: skip
    if ME == 0:
        k_ring, v_ring = shared.k0, shared.v0
    else:
        k_ring, v_ring = shared.k1, shared.v1
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    tile = load_tile(entry, kv_head)
    blocks = gl.cdiv(tile.length, STEP) - _first_block(_key0(tile), CAUSAL)
    acc_k = gl.zeros([HALF, D], gl.float32, acc_layout)
    acc_v = gl.zeros([HALF, D], gl.float32, acc_layout)
    k = k_ring.at(0)
    v = v_ring.at(0)
    k_ring.wait(0)
    v_ring.wait(0)
    step = 0
    for member in range(GROUP):
        if not CAUSAL:
            # Carried from one to the next it would stay 0 here, without a word of the compiler.
            step = member * blocks
        before = 0
        slopes_at = 0
        if SLOPES:  # looked up again: the loop has no registers to keep it in
            slopes_at = _first_slopes(entry, kv_head * GROUP + member, KV_HEADS * GROUP, CAUSAL, ME)
            slopes_at -= (step + (ME if CAUSAL else 0)) * STEP  # from here on a step is a block
        if CAUSAL:
            if ME == 1:  # the first block comes before all keys of this warpgroup
                shared.q.wait(step)
                shared.q.release(step)
                step += 1
            before = ME + 1
            if blocks > ME:
                acc_k, acc_v, step = _keys_step(
                    acc_k, acc_v, step, k, v, shared, scale_log2, slopes_desc, slopes_at, D, True,
                    SLOPES, ME)  # fmt: skip
        end = gl.maximum(step + blocks - before, step)
        for now in range(step, end):
            acc_k, acc_v, _ = _keys_step(
                acc_k, acc_v, now, k, v, shared, scale_log2, slopes_desc, slopes_at, D, False, SLOPES, ME)  # fmt: skip
        step = end
    if SLOPES:
        tma.store_wait(0)
    tile = load_tile(entry, kv_head)  # again: the loop has no registers to keep it in
    row0 = _key0(tile) + ME * HALF
    acc_k = acc_k * (scale_log2 / LOG2_E)
    head = FIRST + kv_head
    store_rows(dkv, acc_k.to(k.dtype), k, k_ring.free.index(0), tile, row0, head, ROW, D)
    head += KV_HEADS
    store_rows(dkv, acc_v.to(k.dtype), v, v_ring.free.index(0), tile, row0, head, ROW, D)


@gluon.jit
def keys_kernel(q_desc, k_desc, v_desc, dout_desc, level_desc, delta_desc, slopes_desc, dkv, tiles, cu, sequences,
                tokens, scale_log2, KV_HEADS: gl.constexpr, FIRST: gl.constexpr, ROW: gl.constexpr,
                GROUP: gl.constexpr, SECTION: gl.constexpr,
                D: gl.constexpr, BUFFERS: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
                SLOPES: gl.constexpr, REGISTERS: gl.constexpr):  # fmt: skip
    """One program per tile of 128 keys, longest first: here the hardware hands them out.

    SLOPES: leave ds behind, in blocks; without it the descriptor is any.
    """
    clear_behind(dkv, gl.load(cu + sequences), tokens, ROW, D)
    work = make_tile_schedule(tiles, 0, 0, KV_HEADS, SECTION, False)
    if gl.program_id(0) >= work.count * KV_HEADS:
        return
    entry, kv_head = work.listed(gl.program_id(0))
    shared = KeysShared(
        make_ring(k_desc, 1, 1), make_ring(k_desc, 1, 1), make_ring(v_desc, 1, 1), make_ring(v_desc, 1, 1),
        make_ring(q_desc, BUFFERS, 2), buffers(dout_desc, BUFFERS), buffers(level_desc, BUFFERS),
        buffers(delta_desc, BUFFERS), buffers(slopes_desc, 2 if SLOPES else 1))  # fmt: skip
    gl.warp_specialize([
        (_compute_keys, (dkv, slopes_desc, shared, entry, kv_head, scale_log2, KV_HEADS, FIRST, ROW, GROUP, D, CAUSAL,
                         SLOPES, 0)),
        (_compute_keys, (dkv, slopes_desc, shared, entry, kv_head, scale_log2, KV_HEADS, FIRST, ROW, GROUP, D, CAUSAL,
                         SLOPES, 1)),
        (_copy_for_keys, (q_desc, k_desc, v_desc, dout_desc, level_desc, delta_desc, shared, entry, kv_head, GROUP, D,
                          CAUSAL, RAGGED)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
