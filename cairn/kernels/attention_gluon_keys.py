# pyrefly: ignore-errors
"""Gradients of keys and values in Gluon for sm_90: one program per tile of 128 keys, over all heads of its group.

A warp copies, two warpgroups compute 64 keys each. Scores are [keys, queries], so that weights and slopes are the left
operand of the next product as they come, in registers:

    s = k q^T and dp = v dout^T;    while dp runs, p = exp(s - lse);    ds = p (dp - delta);    dv += p dout, dk += ds q

While one warpgroup computes exponentials, the other has the tensor cores. lse and delta come from `rows_kernel` with a
factor (see attention_gluon_backward): they are where the sums s and dp start. Each sequence starts a tile of its own
there, and rows behind its end weigh nothing. dk and dv lie side by side in one tensor [T, 2, K, C].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from cairn.kernels.attention_gluon_kernel import LOG2_E, NOTHING, clear_behind, store_rows
from cairn.kernels.attention_rings import (
    HALF,
    TILE,
    Ring,
    buffers,
    copy_rows,
    load_tile,
    make_ring,
    make_work,
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

    @gluon.constexpr_function
    def __init__(self, k0, k1, v0, v1, q, dout, level, delta):
        self.k0, self.k1, self.v0, self.v1 = k0, k1, v0, v1
        self.q, self.dout, self.level, self.delta = q, dout, level, delta


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
def _keys_step(
    acc_k, acc_v, step, k, v, shared, scale_log2, D: gl.constexpr, DIAGONAL: gl.constexpr
):
    """What a block of queries gives to the keys and values of this warpgroup."""
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
    slopes = weights * warpgroup_mma_wait(0, (slopes,))
    weights = gl.convert_layout(weights.to(k.dtype), weight_layout)
    slopes = gl.convert_layout(slopes.to(k.dtype), weight_layout)
    acc_v = warpgroup_mma(weights, dout, acc_v, is_async=True)
    acc_k = warpgroup_mma(slopes, q, acc_k, is_async=True)
    acc_v, acc_k, weights, slopes = warpgroup_mma_wait(0, (acc_v, acc_k, weights, slopes))
    shared.q.release(step)
    return acc_k, acc_v, step + 1


@gluon.jit
def _compute_keys(dkv, shared, entry, kv_head, scale_log2, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
                  D: gl.constexpr, CAUSAL: gl.constexpr, ME: gl.constexpr):  # fmt: skip
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
    for _member in range(GROUP):
        before = 0
        if CAUSAL:
            if ME == 1:  # the first block comes before all keys of this warpgroup
                shared.q.wait(step)
                shared.q.release(step)
                step += 1
            before = ME + 1
            if blocks > ME:
                acc_k, acc_v, step = _keys_step(
                    acc_k, acc_v, step, k, v, shared, scale_log2, D, True
                )
        for _block in range(before, blocks):
            acc_k, acc_v, step = _keys_step(acc_k, acc_v, step, k, v, shared, scale_log2, D, False)
    tile = load_tile(entry, kv_head)  # again: the loop has no registers to keep it in
    row0 = _key0(tile) + ME * HALF
    acc_k = acc_k * (scale_log2 / LOG2_E)
    store_rows(
        dkv, acc_k.to(k.dtype), k, k_ring.free.index(0), tile, row0, kv_head, 2 * KV_HEADS, D
    )
    store_rows(
        dkv,
        acc_v.to(k.dtype),
        v,
        v_ring.free.index(0),
        tile,
        row0,
        kv_head + KV_HEADS,
        2 * KV_HEADS,
        D,
    )


@gluon.jit
def keys_kernel(q_desc, k_desc, v_desc, dout_desc, level_desc, delta_desc, dkv, tiles, cu, sequences, tokens,
                scale_log2, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, D: gl.constexpr,
                BUFFERS: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
                REGISTERS: gl.constexpr):  # fmt: skip
    """One program per tile of 128 keys, longest first: here the hardware hands them out."""
    clear_behind(dkv, gl.load(cu + sequences), tokens, 2 * KV_HEADS, D)
    work = make_work(tiles, 0, 0, KV_HEADS, SECTION, False)
    if gl.program_id(0) >= work.count * KV_HEADS:
        return
    entry, kv_head = work.listed(gl.program_id(0))
    shared = KeysShared(
        make_ring(k_desc, 1, 1), make_ring(k_desc, 1, 1), make_ring(v_desc, 1, 1), make_ring(v_desc, 1, 1),
        make_ring(q_desc, BUFFERS, 2), buffers(dout_desc, BUFFERS), buffers(level_desc, BUFFERS),
        buffers(delta_desc, BUFFERS))  # fmt: skip
    gl.warp_specialize([
        (_compute_keys, (dkv, shared, entry, kv_head, scale_log2, KV_HEADS, GROUP, D, CAUSAL, 0)),
        (_compute_keys, (dkv, shared, entry, kv_head, scale_log2, KV_HEADS, GROUP, D, CAUSAL, 1)),
        (_copy_for_keys, (q_desc, k_desc, v_desc, dout_desc, level_desc, delta_desc, shared, entry, kv_head, GROUP, D,
                          CAUSAL, RAGGED)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
