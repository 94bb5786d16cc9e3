# pyrefly: ignore-errors
"""The kernel of skinny_matmul that streams weights through shared memory, in Gluon for sm_90.

    ring    STAGES buffers, each PIECES x 64 rows of w and BM rows of x, BK columns wide; filled by TMA
    order   fill the ring with w  ->  wait for the predecessor  ->  add x  ->  multiply, and fill again what was used

w's rows are the tall side of the product (64 for a warpgroup), so that few rows of x waste little. Few programs with
deep rings beat many with shallow ones: a third of the multiprocessors may stay free, and the successor's programs
start filling theirs there. Where even so there are too few tiles, columns are cut into SPLIT parts of equal length but
for one step, whose float32 sums a second kernel joins. Programs that share rows of w are neighbours: one reads them
from memory, the others from the L2 cache.

With SwiGLU every 16 rows of a piece are 8 of the gate and the 8 of up that belong to them: a thread has both.
Operands of float8 have a scale for each of their rows, which multiplies the sums. Where w has one for each block of
128 x 128 instead (BLOCKS), a step is one block wide, and its product is scaled before it is added.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PIECE = gl.constexpr(64)  # rows of w that a warpgroup multiplies at once
BLOCK = gl.constexpr(128)  # rows and columns of w that may share a scale


@gluon.jit
def _ask_w(
    w, weights, full, slot, n0, k, more, BYTES: gl.constexpr, PIECES: gl.constexpr, SWIGLU: gl.constexpr
):  # fmt: skip
    mbarrier.expect(full.index(slot), BYTES, pred=more)
    for piece in gl.static_range(PIECES):
        row = n0 + piece * PIECE
        if SWIGLU:
            at = [row // 16, 0, 0, k]
        else:
            at = [row, k]
        tma.async_copy_global_to_shared(
            w, at, full.index(slot), weights.index(slot * PIECES + piece), pred=more
        )


@gluon.jit
def _rows(n0, N, layout: gl.constexpr, SWIGLU: gl.constexpr):
    """Which rows of w a piece holds."""
    row = n0 + gl.arange(0, PIECE, layout=layout)
    if SWIGLU:
        n = row // 16 * 8 + row % 8 + row % 16 // 8 * (N // 2)
        return gl.where(row < N, n, N)
    else:
        return row


@gluon.jit
def _scales_of_w(
    scale_w, n0, N, layout: gl.constexpr, PIECES: gl.constexpr, BLOCKS: gl.constexpr, SWIGLU: gl.constexpr
):  # fmt: skip
    """Of the rows of each piece, where rows have them. Ask with the weights: they come from the memory, too."""
    found = ()
    for piece in gl.static_range(PIECES):
        if scale_w is not None and not BLOCKS:
            rows = _rows(n0 + piece * PIECE, N, gl.SliceLayout(1, layout), SWIGLU)
            found = found + (gl.load(scale_w + rows, mask=rows < N, other=0.0),)  # noqa: RUF005
    return found


@gluon.jit
def _scaled(sums, scale_x, of_w, m0, M):
    """Sums of float8 products times the scales of their rows; blocks of w have been scaled on the way (no `of_w`)."""
    layout: gl.constexpr = sums.type.layout
    BM: gl.constexpr = sums.type.shape[1]
    m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(0, layout))
    of_x = gl.load(scale_x + m, mask=m < M, other=0.0)
    if of_w is None:
        return sums * of_x[None, :]
    else:
        return sums * of_w[:, None] * of_x[None, :]


@gluon.jit
def _deliver(sums, bias, residual, y, n0, m0, stride_r, stride_y, M, N, SWIGLU: gl.constexpr):
    """What follows the product, and the store, 16 bytes along n where a thread has so many."""
    BM: gl.constexpr = sums.type.shape[1]
    if bias is not None:
        rows = _rows(n0, N, gl.SliceLayout(1, sums.type.layout), SWIGLU)
        sums += gl.load(bias + rows, mask=rows < N, other=0.0).to(gl.float32)[:, None]
    if SWIGLU:
        pairs = sums.reshape([PIECE // 16, 2, 8, BM]).permute((0, 2, 3, 1))
        gate, up = gl.split(pairs)
        result = (gate / (1.0 + gl.exp(-gate)) * up).reshape([PIECE // 2, BM])
        ROWS: gl.constexpr = PIECE // 2
        first = n0 // 2
        limit = N // 2
    else:
        result = sums
        ROWS: gl.constexpr = PIECE
        first = n0
        limit = N
    WIDE: gl.constexpr = min(8, BM * ROWS // 128)
    layout: gl.constexpr = gl.BlockedLayout([WIDE, 1], [ROWS // WIDE, 32 * WIDE // ROWS], [1, 4], [0, 1])  # fmt: skip
    n = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(0, layout))[None, :]
    inside = (n < limit) & (m < M)
    if residual is None:
        final = gl.convert_layout(result.to(y.dtype.element_ty), layout)
    else:
        wide = gl.convert_layout(result, layout)
        wide += gl.load(residual + m * stride_r + n, mask=inside, other=0.0).to(gl.float32)
        final = wide.to(y.dtype.element_ty)
    gl.store(y + m * stride_y + n, final, mask=inside)


@gluon.jit
def stream_kernel(
    x, w, scale_x, scale_w, bias, residual, y, parts, stride_r, stride_y, M, N, K,
    PIECES: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr,
    SWIGLU: gl.constexpr, OVERLAP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    BM: gl.constexpr = x.block_type.shape[0]
    BK: gl.constexpr = x.block_type.shape[1]
    BITS: gl.constexpr = w.dtype.primitive_bitwidth
    BYTES: gl.constexpr = (PIECES * PIECE + BM) * BK * BITS // 8
    if OVERLAP:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    blocks = gl.cdiv(M, BM)
    m0 = gl.program_id(0) % blocks * BM
    tile = gl.program_id(0) // blocks // SPLIT
    part = gl.program_id(0) // blocks % SPLIT
    steps = gl.cdiv(K, BK)
    begin = steps * part // SPLIT
    count = steps * (part + 1) // SPLIT - begin
    n0 = tile * (PIECES * PIECE)
    weights = gl.allocate_shared_memory(w.dtype, [STAGES * PIECES] + w.block_type.shape, w.layout)  # noqa: RUF005
    values = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
    for slot in gl.static_range(STAGES):
        _ask_w(w, weights, full, slot, n0, (begin + slot) * BK, slot < count, BYTES, PIECES, SWIGLU)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 256 // BITS])
    of_w = _scales_of_w(scale_w, n0, N, layout, PIECES, BLOCKS, SWIGLU)
    if OVERLAP and EARLY:
        gdc_wait()
    for slot in gl.static_range(STAGES):
        at = [m0, (begin + slot) * BK]
        tma.async_copy_global_to_shared(
            x, at, full.index(slot), values.index(slot), pred=slot < count
        )

    sums = ()
    for _ in gl.static_range(PIECES):
        sums = sums + (gl.zeros([PIECE, BM], gl.float32, layout),)  # noqa: RUF005
    if BLOCKS:  # a step is one of them
        of_blocks = scale_w + n0 // BLOCK * steps + begin
        ahead = gl.load(of_blocks)
    for step in range(count):
        if BLOCKS:
            factor = ahead
            ahead = gl.load(of_blocks + gl.minimum(step + 1, count - 1))
        turn = step % STAGES
        mbarrier.wait(full.index(turn), step // STAGES % 2)
        across = values.index(turn).permute((1, 0))
        going = ()
        for piece in gl.static_range(PIECES):
            rows = weights.index(turn * PIECES + piece).reshape([PIECE, BK])
            if BLOCKS:
                none = gl.zeros([PIECE, BM], gl.float32, layout)
                going = (warpgroup_mma(rows, across, none, use_acc=False, is_async=True),)
            else:
                going = going + (warpgroup_mma(rows, across, sums[piece], is_async=True),)  # noqa: RUF005
        if BLOCKS:
            sums = (sums[0] + warpgroup_mma_wait(0, going) * factor,)
        elif PIECES == 1:
            sums = (warpgroup_mma_wait(0, going),)
        else:
            sums = warpgroup_mma_wait(0, going)
        gl.thread_barrier()  # all warps have read the buffers that are filled again now
        more = step + STAGES < count
        k = (begin + step + STAGES) * BK
        _ask_w(w, weights, full, turn, n0, k, more, BYTES, PIECES, SWIGLU)
        tma.async_copy_global_to_shared(x, [m0, k], full.index(turn), values.index(turn), pred=more)
    for piece in gl.static_range(PIECES):
        row = n0 + piece * PIECE
        result = sums[piece]
        if scale_w is not None:
            result = _scaled(result, scale_x, None if BLOCKS else of_w[piece], m0, M)
        if parts is None:
            _deliver(result, bias, residual, y, row, m0, stride_r, stride_y, M, N, SWIGLU)
        else:
            n = row + gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))[:, None]
            m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(0, layout))[None, :]
            gl.store(parts + (part * M + m) * N + n, result, mask=(n < N) & (m < M))
