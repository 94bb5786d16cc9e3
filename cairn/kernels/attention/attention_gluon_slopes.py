# pyrefly: ignore-errors
"""Gradients of queries from slopes that the keys' kernel has left behind, in Gluon for sm_90: dq = ds k, one product.

    ds of a head, causal: blocks [64 keys, 64 queries], side by side those that see the same keys

          queries 0   1   2   3                 in memory:  00 01 02 03 11 12 13 22 23 33
    keys 0        00  01  02  03
         1            11  12  13                a tile of 128 queries: for each block of keys one of its own for each of
         2                22  23                two warpgroups (64 queries), and the keys themselves, which both use
         3                    33

A block lies in memory as it lies in shared memory, keys as rows; the tensor core reads it transposed. Compared with
attention_gluon_queries it saves two products of three and writes and reads 2 bytes for each pair of query and key that
see each other. What it reads decides how long it takes: where heads share keys, a program has two heads at a time
(PAIR), and a block of keys comes once for both. For equal lengths that are whole tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from cairn.kernels.attention.attention_gluon_kernel import store_rows
from cairn.kernels.attention.attention_gluon_keys import STEP, slopes_row
from cairn.kernels.attention.attention_rings import (
    HALF,
    TILE,
    Ring,
    barriers,
    buffers,
    copy_rows,
    make_ring,
    make_tile_schedule,
)


@aggregate
class SlopesShared:
    k: Ring
    slopes0: Ring  # of warpgroup 0
    slopes1: Ring
    second0: (
        gl.shared_memory_descriptor
    )  # of the second head of a pair; the barriers are those of the first
    second1: gl.shared_memory_descriptor
    out0: gl.shared_memory_descriptor  # results on their way out
    out1: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor  # barriers that nobody waits for

    @gluon.constexpr_function
    def __init__(self, k, slopes0, slopes1, second0, second1, out0, out1, done):
        self.k, self.slopes0, self.slopes1 = k, slopes0, slopes1
        self.second0, self.second1 = second0, second1
        self.out0, self.out1, self.done = out0, out1, done


@gluon.jit
def _blocks(tile, CAUSAL: gl.constexpr):
    """How many blocks of keys the tile sees; of a causal one the last is seen by warpgroup 1 alone."""
    if CAUSAL:
        return (tile.row0 + TILE) // STEP
    else:
        return tile.length // STEP


@gluon.jit
def _copy_block(slopes_desc, row, more, ring, second, step, PAIR: gl.constexpr):
    """A block of each head of the pair; that of the second lies `more` rows behind that of the first."""
    full = ring.filled(step)
    ring.begin(step, PAIR * slopes_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(slopes_desc, [row, 0], full, ring.at(step))
    if PAIR == 2:
        place = second.index(step % ring.SIZE)
        tma.async_copy_global_to_shared(slopes_desc, [row + more, 0], full, place)


@gluon.jit
def _copy_slopes(slopes_desc, k_desc, shared, work, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
                 PAIR: gl.constexpr):  # fmt: skip
    step = 0
    step0 = 0  # of warpgroup 0, which sees a block less of each causal tile
    for turn in range(work.rounds()):
        tile = work.tile(turn)
        world = (tile.start // tile.length * work.HEADS + tile.head) * PAIR
        all_blocks = tile.length // STEP
        more = slopes_row(1, all_blocks, 0, 0, CAUSAL)
        column = tile.head * PAIR // GROUP * D
        query_block = tile.row0 // STEP
        for block in range(_blocks(tile, CAUSAL)):
            shared.k.begin(step, k_desc.block_type.nbytes)
            copy_rows(
                k_desc, tile, block * STEP, column, shared.k.filled(step), shared.k.at(step), False
            )
            row = slopes_row(world, all_blocks, block, query_block, CAUSAL)
            if (not CAUSAL) or block <= query_block:
                _copy_block(slopes_desc, row, more, shared.slopes0, shared.second0, step0, PAIR)
                step0 += 1
            _copy_block(slopes_desc, row + STEP, more, shared.slopes1, shared.second1, step, PAIR)
            step += 1


@gluon.jit
def _compute_from_slopes(dq, shared, work, scale, D: gl.constexpr, ROW: gl.constexpr, CAUSAL: gl.constexpr,
                         PAIR: gl.constexpr, ME: gl.constexpr):  # fmt: skip
    if ME == 0:
        slopes, second, staging = shared.slopes0, shared.second0, shared.out0
    else:
        slopes, second, staging = shared.slopes1, shared.second1, shared.out1
    dtype: gl.constexpr = slopes.memory.dtype
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    step = 0
    mine = 0
    for turn in range(work.rounds()):
        tile = work.tile(turn)
        blocks = _blocks(tile, CAUSAL)
        if CAUSAL and ME == 0:
            blocks -= 1
        acc = gl.zeros([HALF, D], gl.float32, acc_layout)
        other = gl.zeros([HALF, D], gl.float32, acc_layout)
        for _block in range(blocks):
            shared.k.wait(step)
            slopes.wait(mine)
            k = shared.k.at(step)
            acc = warpgroup_mma(slopes.at(mine).permute((1, 0)), k, acc, is_async=True)
            if PAIR == 2:
                place = second.index(mine % slopes.SIZE)
                other = warpgroup_mma(place.permute((1, 0)), k, other, is_async=True)
            acc, other = warpgroup_mma_wait(0, (acc, other))
            shared.k.release(step)
            slopes.release(mine)
            step += 1
            mine += 1
        if CAUSAL and ME == 0:  # the last block comes after all queries of this warpgroup
            shared.k.wait(step)
            shared.k.release(step)
            step += 1
        row0 = tile.row0 + ME * HALF
        head = tile.head * PAIR
        done = shared.done.index(ME)
        store_rows(dq, (acc * scale).to(dtype), staging, done, tile, row0, head, ROW, D)
        if PAIR == 2:
            store_rows(dq, (other * scale).to(dtype), staging, done, tile, row0, head + 1, ROW, D)


@gluon.jit
def slopes_kernel(slopes_desc, k_desc, out_desc, dq, sequences, length, scale, HEADS: gl.constexpr,
                  GROUP: gl.constexpr, SECTION: gl.constexpr, ROW: gl.constexpr, D: gl.constexpr,
                  BUFFERS: gl.constexpr, PAIR: gl.constexpr, CAUSAL: gl.constexpr,
                  REGISTERS: gl.constexpr):  # fmt: skip
    """As many programs as there are SMs, each for many tiles of 128 queries of PAIR heads, which share their keys.

    A row of dq has ROW heads, of which the first HEADS are its own. `out_desc`: [64, D] of dq.
    """
    work = make_tile_schedule(dq, sequences, length, HEADS // PAIR, SECTION // PAIR, True)
    seconds: gl.constexpr = BUFFERS if PAIR == 2 else 1
    shared = SlopesShared(
        make_ring(k_desc, BUFFERS, 2), make_ring(slopes_desc, BUFFERS, 1), make_ring(slopes_desc, BUFFERS, 1),
        buffers(slopes_desc, seconds), buffers(slopes_desc, seconds),
        buffers(out_desc, 1).index(0), buffers(out_desc, 1).index(0), barriers(2, 1))  # fmt: skip
    gl.warp_specialize([
        (_compute_from_slopes, (dq, shared, work, scale, D, ROW, CAUSAL, PAIR, 0)),
        (_compute_from_slopes, (dq, shared, work, scale, D, ROW, CAUSAL, PAIR, 1)),
        (_copy_slopes, (slopes_desc, k_desc, shared, work, GROUP, D, CAUSAL, PAIR)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
