# pyrefly: ignore-errors
"""The kernel of int4_matmul, in Gluon for sm_90: 4-bit weights become the register operand of the tensor cores.

    ring    STAGES buffers: PIECES x 64 rows of packed weights and their scales (cp.async), BM rows of x (TMA)
    step    BK columns, at most one group: unpack -> multiply -> sums += scale * product

Unpacking is one shift, one mask and one subtraction for two weights: a level in the low bits of bfloat16's 128 is 128 +
level, and 136 less leaves the whole number level - 8 exactly. Shifts that are not -8 * scale multiply the group's sum
of x, which the tensor cores compute beside it with a matrix of ones. The order of work is that of skinny_stream.
It compiles for sm_90 without spills and has not run on a GPU yet: no form that a user can choose calls it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.matmul.skinny_stream import _deliver

PIECE = gl.constexpr(64)  # rows of w that a warpgroup multiplies at once
TILE_BYTES = gl.constexpr(2048)  # of 64 x 64 weights


@gluon.jit
def _unpacked(raw, layout: gl.constexpr):
    """2,048 bytes, 16 for each thread -> [64, 64] of level - 8 in the registers that the tensor cores read."""
    words = raw.reshape([4, 8, 4, 4, 2, 2]).permute((0, 4, 1, 3, 2, 5)).reshape([PIECE, 32])
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b32 t1, t2, t3, c;
        mov.b32 c, 0x43084308;
        shr.b32 t1, $4, 4;
        shr.b32 t2, $4, 8;
        shr.b32 t3, $4, 12;
        lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $1, t1, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $2, t2, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $3, t3, 0x000f000f, 0x43004300, 0xea;
        sub.rn.bf16x2 $0, $0, c;
        sub.rn.bf16x2 $1, $1, c;
        sub.rn.bf16x2 $2, $2, c;
        sub.rn.bf16x2 $3, $3, c;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    both = (
        gl.join(low, high).reshape([PIECE, 4, 8, 2]).permute((0, 1, 3, 2)).reshape([PIECE, PIECE])
    )
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def _ask_w(w, scales, shifts, packed, factors, slot, tile, k, more, tiles_k, N, GROUP: gl.constexpr,
           BK: gl.constexpr, PIECES: gl.constexpr, SHIFTS: gl.constexpr):  # fmt: skip
    """Weights and scales of one step; one group of copies, also where there is none left."""
    TILES: gl.constexpr = BK // PIECE
    bytes_layout: gl.constexpr = gl.BlockedLayout([16], [32], [4], [0])
    rows_layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    lane = gl.arange(0, TILE_BYTES, layout=bytes_layout)
    row = gl.arange(0, PIECE, layout=rows_layout)
    for piece in gl.static_range(PIECES):
        at = w + ((tile * PIECES + piece) * tiles_k + k // PIECE).to(gl.int64) * TILE_BYTES
        for j in gl.static_range(TILES):
            async_copy.async_copy_global_to_shared(
                packed.index((slot * PIECES + piece) * TILES + j),
                at + j * TILE_BYTES + lane,
                mask=(lane < TILE_BYTES) & more,
            )
        first = k // GROUP * N + (tile * PIECES + piece) * PIECE
        async_copy.async_copy_global_to_shared(
            factors.index((slot * PIECES + piece) * (1 + SHIFTS)),
            scales + first + row,
            mask=(row < PIECE) & more,
        )
        if SHIFTS:
            async_copy.async_copy_global_to_shared(
                factors.index((slot * PIECES + piece) * 2 + 1),
                shifts + first + row,
                mask=(row < PIECE) & more,
            )
    async_copy.commit_group()


@gluon.jit
def _ask_x(x, values, full, slot, m0, k, more, BK: gl.constexpr, BM: gl.constexpr):
    TILES: gl.constexpr = BK // PIECE
    mbarrier.expect(full.index(slot), BM * BK * 2, pred=more)
    for j in gl.static_range(TILES):
        tma.async_copy_global_to_shared(
            x, [m0, k + j * PIECE], full.index(slot), values.index(slot * TILES + j), pred=more
        )


@gluon.jit
def int4_kernel(
    x, w, scales, shifts, bias, y, parts, stride_y, M, N, K,
    BK: gl.constexpr, GROUP: gl.constexpr, PIECES: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    SHIFTS: gl.constexpr, SWIGLU: gl.constexpr, OVERLAP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    BM: gl.constexpr = x.block_type.shape[0]
    TILES: gl.constexpr = BK // PIECE
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    bytes_layout: gl.constexpr = gl.BlockedLayout([16], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if OVERLAP:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    blocks = gl.cdiv(M, BM)
    m0 = gl.program_id(0) % blocks * BM
    tile = gl.program_id(0) // blocks // SPLIT
    part = gl.program_id(0) // blocks % SPLIT
    tiles_k = K // PIECE
    steps = K // BK
    begin = steps * part // SPLIT
    count = steps * (part + 1) // SPLIT - begin
    values = gl.allocate_shared_memory(x.dtype, [STAGES * TILES, BM, PIECE], x.layout)
    packed = gl.allocate_shared_memory(gl.int8, [STAGES * PIECES * TILES, TILE_BYTES], flat)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES * PIECES * (1 + SHIFTS), PIECE], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
    for slot in gl.static_range(STAGES - 1):
        _ask_w(w, scales, shifts, packed, factors, slot, tile, (begin + slot) * BK, slot < count, tiles_k, N, GROUP,
               BK, PIECES, SHIFTS)  # fmt: skip
    if OVERLAP and EARLY:
        gdc_wait()
    for slot in gl.static_range(STAGES - 1):
        _ask_x(x, values, full, slot, m0, (begin + slot) * BK, slot < count, BK, BM)

    sums = ()
    for _piece in gl.static_range(PIECES):
        sums = sums + (gl.zeros([PIECE, BM], gl.float32, layout),)  # noqa: RUF005
    ones = gl.full([PIECE, PIECE], 1.0, gl.bfloat16, operand)
    for step in range(count):
        turn = step % STAGES
        async_copy.wait_group(STAGES - 2)
        mbarrier.wait(full.index(turn), step // STAGES % 2)
        gl.thread_barrier()  # all have this step's copies, and are done with the buffer that is filled now
        later = step + STAGES - 1
        k = (begin + later) * BK
        _ask_x(x, values, full, later % STAGES, m0, k, later < count, BK, BM)
        _ask_w(w, scales, shifts, packed, factors, later % STAGES, tile, k, later < count, tiles_k, N, GROUP, BK,
               PIECES, SHIFTS)  # fmt: skip
        if SHIFTS:
            of_x = gl.zeros([PIECE, BM], gl.float32, layout)
            for j in gl.static_range(TILES):
                across = values.index(turn * TILES + j).permute((1, 0))
                of_x = warpgroup_mma(ones, across, of_x, is_async=True)
            of_x, ones = warpgroup_mma_wait(0, (of_x, ones))
        new = ()
        for piece in gl.static_range(PIECES):
            product = gl.zeros([PIECE, BM], gl.float32, layout)
            held = ()
            for j in gl.static_range(TILES):
                raw = packed.index((turn * PIECES + piece) * TILES + j).load(bytes_layout)
                weights = _unpacked(raw, operand)
                across = values.index(turn * TILES + j).permute((1, 0))
                product = warpgroup_mma(weights, across, product, use_acc=j > 0, is_async=True)
                held = held + (weights,)  # noqa: RUF005
            if TILES == 2:  # the operands stay in their registers until the products have read them
                product, _first, _second = warpgroup_mma_wait(0, (product, held[0], held[1]))
            else:
                product, _first = warpgroup_mma_wait(0, (product, held[0]))
            of_row: gl.constexpr = gl.SliceLayout(1, layout)
            scale = factors.index((turn * PIECES + piece) * (1 + SHIFTS)).load(of_row)
            total = sums[piece] + product * scale[:, None]
            if SHIFTS:
                total += of_x * factors.index((turn * PIECES + piece) * 2 + 1).load(of_row)[:, None]
            new = new + (total,)  # noqa: RUF005
        sums = new
    async_copy.wait_group(0)
    for piece in gl.static_range(PIECES):
        row = (tile * PIECES + piece) * PIECE
        if parts is None:
            _deliver(sums[piece], bias, None, y, row, m0, 0, stride_y, M, N, SWIGLU)
        else:
            n = row + gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))[:, None]
            m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(0, layout))[None, :]
            gl.store(parts + (part * M + m) * N + n, sums[piece], mask=(n < N) & (m < M))
