# pyrefly: ignore-errors
"""The grouped product of many tokens in Gluon for sm_90: warps that copy, two warpgroups that multiply.

    copying warps    rows of w by TMA, rows of x by TMA or gathered one by one (cp.async), into a ring of stages
    warpgroups 0, 1  64 rows of x each times the same rows of w; each has an epilogue of its own

The warpgroups share stages and wait for nothing else of one another, so one goes on multiplying while the other scales,
gates and writes its results. Where a tile has at most 64 rows of its expert the second one skips it: experts end
anywhere, and half of what is behind the end is not multiplied. `row_tiles_kernel` lists the tiles.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from cairn.kernels.attention.attention_rings import barriers
from cairn.kernels.dependent import begin
from cairn.kernels.experts.grouped_kernel import expert_blocks

ROWS = gl.constexpr(128)  # of x in a tile
HALF = gl.constexpr(64)  # of a warpgroup
COLUMNS = gl.constexpr(256)  # rows of w in a tile
STAGED = gl.constexpr(128)  # columns that a warpgroup writes at once
THREADS = gl.constexpr(128)  # that copy
ENTRY = tl.constexpr(4)  # numbers of a tile in the list


@triton.jit
def row_tiles_kernel(
    ends, tiles, COUNT: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """tiles[0] = how many; behind it expert, first row and end of the expert's rows for each."""
    begin(OVERLAP)
    e, start, end, blocks, behind = expert_blocks(ends, COUNT, WIDTH, BM)
    total = tl.sum(blocks, axis=0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = (behind[None, :] > tile[:, None]) & ((behind - blocks)[None, :] <= tile[:, None])
    expert = tl.sum(tl.where(mine, e[None, :], 0), axis=1)
    offset = (tile[:, None] - (behind - blocks)[None, :]) * BM
    first = tl.sum(tl.where(mine, start[None, :] + offset, 0), axis=1)
    last = tl.sum(tl.where(mine, end[None, :], 0), axis=1)
    at = tiles + (tile + 1) * ENTRY
    known = tile < tl.maximum(total, 1)  # a program without tiles looks at the first one
    tl.store(at, expert, mask=known)
    tl.store(at + 1, first, mask=known)
    tl.store(at + 2, last, mask=known)
    if tl.program_id(0) == 0:
        tl.store(tiles, total)


@aggregate
class Stages:
    """A ring whose buffers hold rows of x, for each warpgroup, and rows of w."""

    x: gl.shared_memory_descriptor  # [SIZE, ROWS, BK]
    w: gl.shared_memory_descriptor  # [SIZE, COLUMNS, BK]
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    SIZE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, x, w, full, free, SIZE):
        self.x, self.w, self.full, self.free = x, w, full, free
        self.SIZE = gl.constexpr(SIZE)

    @gluon.jit
    def wait_free(self, step):
        mbarrier.wait(self.free.index(step % self.SIZE), step // self.SIZE % 2 ^ 1)

    @gluon.jit
    def wait(self, step):
        mbarrier.wait(self.full.index(step % self.SIZE), step // self.SIZE % 2)

    @gluon.jit
    def release(self, step, pred=True):
        mbarrier.arrive(self.free.index(step % self.SIZE), count=1, pred=pred)


@aggregate
class Tile:
    expert: gl.tensor
    first: gl.tensor  # row
    last: gl.tensor  # end of the expert's rows
    block: gl.tensor  # of columns

    @gluon.constexpr_function
    def __init__(self, expert, first, last, block):
        self.expert, self.first, self.last, self.block = expert, first, last, block


@aggregate
class Work:
    """The tiles of this program; those of the same rows lie beside each other, so that the rows stay in the cache."""

    tiles: gl.tensor
    total: gl.tensor
    BLOCKS: gl.constexpr  # tiles beside each other

    @gluon.constexpr_function
    def __init__(self, tiles, total, BLOCKS):
        self.tiles, self.total = tiles, total
        self.BLOCKS = gl.constexpr(BLOCKS)

    @gluon.jit
    def tile(self, turn):
        """The turn-th tile of this program; behind the last one, one that nobody uses."""
        place = gl.minimum(gl.program_id(0) + turn * gl.num_programs(0), self.total - 1)
        place = gl.maximum(place, 0)
        at = self.tiles + (place // self.BLOCKS + 1) * 4
        return Tile(gl.load(at), gl.load(at + 1), gl.load(at + 2), place % self.BLOCKS)

    @gluon.jit
    def rounds(self):
        programs = gl.num_programs(0)
        return gl.maximum(self.total - gl.program_id(0) + programs - 1, 0) // programs


@gluon.jit
def _first_row(tile, N, SWIGLU: gl.constexpr):
    """Of w, in the matrices of all experts, and how far behind it the second half of a tile lies."""
    if SWIGLU:
        return tile.expert * (2 * N) + tile.block * STAGED, N
    else:
        return tile.expert * N + tile.block * COLUMNS, gl.to_tensor(STAGED)


@gluon.jit
def _sources(order, tile, PER_TOKEN: gl.constexpr, GATHER: gl.constexpr, layout: gl.constexpr):
    """The row of x that each row of a tile is gathered from."""
    row = tile.first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    if GATHER:
        return gl.load(order + row, mask=row < tile.last, other=0) // PER_TOKEN
    else:
        return row


@gluon.jit
def _copy(x, x_desc, w_desc, order, stages, work, N, stride_x, K: gl.constexpr, BK: gl.constexpr,
          PER_TOKEN: gl.constexpr, GATHER: gl.constexpr, SWIGLU: gl.constexpr):  # fmt: skip
    BYTES: gl.constexpr = w_desc.block_type.nbytes * 2 + (0 if GATHER else x_desc.block_type.nbytes)
    layout: gl.constexpr = gl.BlockedLayout([1, BK // 8], [4, 8], [4, 1], [1, 0])  # 16 bytes
    step = 0
    tile = work.tile(0)
    sources = _sources(order, tile, PER_TOKEN, GATHER, layout)
    for turn in range(work.rounds()):
        next_tile = work.tile(turn + 1)  # known by the time it is needed
        top, behind = _first_row(tile, N, SWIGLU)
        rows = x + sources.to(gl.int64)[:, None] * stride_x
        rows = rows + gl.arange(0, BK, layout=gl.SliceLayout(0, layout))[None, :]
        sources = _sources(order, next_tile, PER_TOKEN, GATHER, layout)
        for k in range(0, K, BK):
            stages.wait_free(step)
            full = stages.full.index(step % stages.SIZE)
            w = stages.w.index(step % stages.SIZE)
            inner = stages.x.index(step % stages.SIZE)
            mbarrier.expect(full, BYTES)
            tma.async_copy_global_to_shared(w_desc, [top, k], full, w.slice(0, STAGED))
            tma.async_copy_global_to_shared(
                w_desc, [top + behind, k], full, w.slice(STAGED, STAGED)
            )
            if GATHER:
                async_copy.async_copy_global_to_shared(inner, rows + k)
                async_copy.mbarrier_arrive(full, increment_count=False)
            else:
                tma.async_copy_global_to_shared(x_desc, [tile.first, k], full, inner)
            step += 1
        tile = next_tile


@gluon.jit
def _written(y, values, staging, row0, last, column0, N):
    """Columns of a warpgroup's rows to global memory, 16 bytes of a thread at once, through its own buffer."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    gl.thread_barrier()  # the results before these have been read
    staging.store(values.to(y.dtype.element_ty))
    gl.thread_barrier()
    result = staging.load(layout)
    row = row0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    column = column0 + gl.arange(0, STAGED, layout=gl.SliceLayout(0, layout))
    gl.store(
        y + row.to(gl.int64)[:, None] * N + column[None, :], result, mask=(row < last)[:, None]
    )


@gluon.jit
def _column_scales(w_scales, top, behind, layout: gl.constexpr):
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    return gl.load(w_scales + top + column + gl.where(column < STAGED, 0, behind - STAGED))


@gluon.jit
def _compute(y, order, x_scales, w_scales, stages, staging, work, N, K: gl.constexpr, BK: gl.constexpr,
             PER_TOKEN: gl.constexpr, GATHER: gl.constexpr, SWIGLU: gl.constexpr, ME: gl.constexpr):  # fmt: skip
    STEPS: gl.constexpr = K // BK
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, BK // 4])
    step = 0
    tile = work.tile(0)
    for turn in range(work.rounds()):
        next_tile = work.tile(turn + 1)
        row0 = tile.first + ME * HALF
        if row0 < tile.last:
            top, behind = _first_row(tile, N, SWIGLU)
            row = row0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
            if x_scales is not None:
                source = row
                if GATHER:
                    source = gl.load(order + row, mask=row < tile.last, other=0) // PER_TOKEN
                row_scales = gl.load(x_scales + source, mask=row < tile.last, other=0.0)
            acc = gl.zeros([HALF, COLUMNS], gl.float32, layout)
            for k in range(STEPS):
                stages.wait(step)
                if GATHER:
                    fence_async_shared()  # cp.async writes as ordinary stores do
                x = stages.x.index(step % stages.SIZE).slice(ME * HALF, HALF)
                w = stages.w.index(step % stages.SIZE)
                acc = warpgroup_mma(x, w.permute((1, 0)), acc, use_acc=k > 0, is_async=True)
                acc = warpgroup_mma_wait(1, (acc,))
                stages.release(step + stages.SIZE - 1, k > 0)
                step += 1
            if w_scales is not None:
                column_scales = _column_scales(w_scales, top, behind, layout)
            acc = warpgroup_mma_wait(0, (acc,))
            stages.release(step + stages.SIZE - 1)
            if w_scales is not None:  # float8: a scale for each row of both
                acc = acc * column_scales[None, :]
                acc = acc * row_scales[:, None]
            left, right = gl.split(acc.reshape([HALF, 2, STAGED]).permute((0, 2, 1)))
            if SWIGLU:
                gated = left / (1.0 + gl.exp(-left)) * right
                _written(y, gated, staging, row0, tile.last, tile.block * STAGED, N)
            else:
                _written(y, left, staging, row0, tile.last, tile.block * COLUMNS, N)
                _written(y, right, staging, row0, tile.last, tile.block * COLUMNS + STAGED, N)
        else:
            for _ in range(STEPS):
                stages.wait(step)
                stages.release(step)
                step += 1
        tile = next_tile


@gluon.jit
def ring_kernel(x, x_desc, w_desc, y, order, tiles, x_scales, w_scales, N, stride_x, K: gl.constexpr,
                BK: gl.constexpr, PER_TOKEN: gl.constexpr, GATHER: gl.constexpr, SWIGLU: gl.constexpr,
                STAGES: gl.constexpr, BLOCKS: gl.constexpr, REGISTERS: gl.constexpr,
                COPYING: gl.constexpr):  # fmt: skip
    """N columns of y. With SwiGLU each expert's matrix has 2 * N rows. BLOCKS: tiles that lie beside each other."""
    kind: gl.constexpr = w_desc.dtype
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BK], kind)
    outer: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, STAGED], y.dtype.element_ty)
    x_memory = gl.allocate_shared_memory(kind, [STAGES, ROWS, BK], rows)
    w_memory = gl.allocate_shared_memory(kind, [STAGES, COLUMNS, BK], w_desc.layout)
    arrivals: gl.constexpr = 1 + THREADS if GATHER else 1
    stages = Stages(x_memory, w_memory, barriers(STAGES, arrivals), barriers(STAGES, 2), STAGES)
    staging0 = gl.allocate_shared_memory(y.dtype.element_ty, [HALF, STAGED], outer)
    staging1 = gl.allocate_shared_memory(y.dtype.element_ty, [HALF, STAGED], outer)
    work = Work(tiles, gl.load(tiles) * BLOCKS, BLOCKS)
    gl.warp_specialize([
        (_compute, (y, order, x_scales, w_scales, stages, staging0, work, N, K, BK, PER_TOKEN, GATHER, SWIGLU, 0)),
        (_compute, (y, order, x_scales, w_scales, stages, staging1, work, N, K, BK, PER_TOKEN, GATHER, SWIGLU, 1)),
        (_copy, (x, x_desc, w_desc, order, stages, work, N, stride_x, K, BK, PER_TOKEN, GATHER, SWIGLU)),
    ], [4, 4], [REGISTERS, COPYING])  # fmt: skip
