# pyrefly: ignore-errors
"""The kernel of packed_matmul, in Gluon for sm_90: packed weights become the register operand of the tensor cores.

    ring           STAGES buffers, each 64 rows of packed weights, their scales, and BM rows of x; filled by TMA
    step           UNITS of at most one group of columns: unpack -> multiply -> sums += scale * product
    small groups   of fewer columns than a tile: unpack and scale -> multiply onto the sums

One warp copies; one warpgroup multiplies, or two take turns and join their sums in the end. Unpacking takes half of
the instructions that a multiprocessor can issue while weights arrive, and leaves none for all warps to copy, too
(`packed_unpack`).

    WGMMA        while the tensor cores multiply one unit, the next is unpacked
    otherwise    for up to 16 rows: warps multiply on their own, and instead of a subtraction for each two levels of
                 int4 the tensor cores add -136 times the unit's sum of x: a fifth fewer instructions

Shifts that are not -8 * scale multiply the unit's sum of x, which the tensor cores compute beside it with a matrix of
ones; those of small groups are added to the weights. Where K is cut, the program that is the last of its tile to store
its sums joins all of them in their order, if there are counters (`arrived`); otherwise another kernel does. The order
of work is that of skinny_stream.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.matmul.packed_unpack import (
    PIECE,
    of_bytes,
    of_words,
    unpacked,
    unpacked_and_scaled,
)
from cairn.kernels.matmul.skinny_stream import _deliver

OFFSET = gl.constexpr(-136.0)  # from 128 + level to level - 8
FLOATS = gl.constexpr(512.0)  # from what is unpacked of e2m1 to the weight


@gluon.jit
def _ask_w(
    w, scales, shifts, packed, factors, added, full, slot, tile, k, more, tiles_k,
    GROUP: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Weights and scales of one step."""
    ROWS: gl.constexpr = w.block_type.shape[0] * PIECE // UNIT  # of 128 bytes, in a tile
    bar = full.index(slot)
    mbarrier.expect(bar, BYTES, pred=more)
    for unit in gl.static_range(UNITS):
        at = k + unit * UNIT
        first = tile * tiles_k + at // PIECE
        if GROUP < PIECE:
            place = [first * (PIECE // GROUP), 0]
        else:
            place = [at // GROUP, tile * PIECE]
        tma.async_copy_global_to_shared(
            w, [first * ROWS, 0], bar, packed[unit].index(slot), pred=more
        )
        tma.async_copy_global_to_shared(scales, place, bar, factors[unit].index(slot), pred=more)
        if shifts is not None:
            tma.async_copy_global_to_shared(shifts, place, bar, added[unit].index(slot), pred=more)


@gluon.jit
def _ask_x(x, values, full, slot, m0, k, more, UNIT: gl.constexpr, UNITS: gl.constexpr):
    for unit in gl.static_range(UNITS):
        tma.async_copy_global_to_shared(
            x, [m0, k + unit * UNIT], full.index(slot), values[unit].index(slot), pred=more
        )


@gluon.jit
def _rings(descriptor, UNITS: gl.constexpr, STAGES: gl.constexpr):
    """UNITS allocations of STAGES times what the descriptor describes."""
    shape: gl.constexpr = descriptor.block_type.shape
    made = ()
    for _ in gl.static_range(UNITS):
        memory = gl.allocate_shared_memory(descriptor.dtype, [STAGES] + shape, descriptor.layout)  # noqa: RUF005
        made = made + (memory,)  # noqa: RUF005
    return made


@gluon.jit
def _copy(
    x, w, scales, shifts, values, packed, factors, added, full, free, tile, m0, begin, count, tiles_k,
    GROUP: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Fills the ring with w, waits for the predecessor, adds x, and fills again what was used."""
    UNIT: gl.constexpr = x.block_type.shape[1]
    BK: gl.constexpr = UNITS * UNIT
    PLANES: gl.constexpr = 1 if shifts is None else 2
    OF_W: gl.constexpr = w.block_type.nbytes + PLANES * scales.block_type.nbytes
    BYTES: gl.constexpr = UNITS * (x.block_type.nbytes + OF_W)
    if OVERLAP and not EARLY:
        gdc_wait()
    for step in gl.static_range(STAGES):
        _ask_w(w, scales, shifts, packed, factors, added, full, step, tile, (begin + step) * BK, step < count, tiles_k,
               GROUP, UNIT, UNITS, BYTES)  # fmt: skip
    if OVERLAP and EARLY:
        gdc_wait()
    for step in gl.static_range(STAGES):
        _ask_x(x, values, full, step, m0, (begin + step) * BK, step < count, UNIT, UNITS)
    for step in range(STAGES, count):
        slot = step % STAGES
        k = (begin + step) * BK
        mbarrier.wait(free.index(slot), step // STAGES % 2 ^ 1)
        _ask_w(w, scales, shifts, packed, factors, added, full, slot, tile, k, True, tiles_k, GROUP, UNIT, UNITS,
               BYTES)  # fmt: skip
        _ask_x(x, values, full, slot, m0, k, True, UNIT, UNITS)


@gluon.jit
def _sums_of_x(values, turn, UNITS: gl.constexpr, layout: gl.constexpr):
    """The sum of each unit's columns of x, in every row of the result."""
    BM: gl.constexpr = values[0].shape[1]
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    ones = gl.full([PIECE, values[0].shape[2]], 1.0, gl.bfloat16, operand)
    found = ()
    for unit in gl.static_range(UNITS):
        sums = gl.zeros([PIECE, BM], gl.float32, layout)
        across = values[unit].index(turn).permute((1, 0))
        sums = warpgroup_mma(ones, across, sums, use_acc=False, is_async=True)
        sums, _ones = warpgroup_mma_wait(0, (sums, ones))
        found = found + (sums,)  # noqa: RUF005
    return found


@gluon.jit
def _scaled(total, product, of_x, scale, shift, SHIFTS: gl.constexpr):
    """A unit's product, and what its shifts make of the sum of x, are added to the sums."""
    total += product * scale[:, None]
    if SHIFTS:
        total += of_x * shift[:, None]
    return total


@gluon.jit
def _by_wgmma(
    total, values, packed, factors, added, turn, read: gl.constexpr, UNITS: gl.constexpr, SHIFTS: gl.constexpr,
    KIND: gl.constexpr,
):  # fmt: skip
    """One step by the warpgroup: a unit is unpacked while the one before is multiplied."""
    BM: gl.constexpr = values[0].shape[1]
    layout: gl.constexpr = total.type.layout
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_x = (total,) * UNITS
    if SHIFTS:
        of_x = _sums_of_x(values, turn, UNITS, layout)
    going = (total, total)
    for unit in gl.static_range(UNITS):
        before = going
        weights = unpacked(packed[unit].index(turn).load(read), operand, KIND, True)
        across = values[unit].index(turn).permute((1, 0))
        product = gl.zeros([PIECE, BM], gl.float32, layout)
        product = warpgroup_mma(weights, across, product, use_acc=False, is_async=True)
        going = (product, weights)
        if unit > 0:
            scale = factors[unit - 1].index(turn).reshape([PIECE]).load(of_row).to(gl.float32)
            shift = added[unit - 1].index(turn).reshape([PIECE]).load(of_row).to(gl.float32)
            last, _weights = warpgroup_mma_wait(1, before)
            total = _scaled(total, last, of_x[unit - 1], scale, shift, SHIFTS)
    scale = factors[UNITS - 1].index(turn).reshape([PIECE]).load(of_row).to(gl.float32)
    shift = added[UNITS - 1].index(turn).reshape([PIECE]).load(of_row).to(gl.float32)
    last, _weights = warpgroup_mma_wait(0, going)
    return _scaled(total, last, of_x[UNITS - 1], scale, shift, SHIFTS)


@gluon.jit
def _by_warps(
    total, values, packed, factors, added, turn, read: gl.constexpr, UNITS: gl.constexpr, SHIFTS: gl.constexpr,
    KIND: gl.constexpr,
):  # fmt: skip
    """One step by each warp on its own: x enters through registers, too, and nothing is waited for."""
    BM: gl.constexpr = values[0].shape[1]
    UNIT: gl.constexpr = values[0].shape[2]
    layout: gl.constexpr = total.type.layout
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    across: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    for unit in gl.static_range(UNITS):
        x = values[unit].index(turn).permute((1, 0)).load(across)
        none = gl.zeros([PIECE, BM], gl.float32, layout)
        of_x, offset = none, none
        if SHIFTS:
            of_x = mma_v2(gl.full([PIECE, UNIT], 1.0, gl.bfloat16, operand), x, none)
            if KIND == "int4":
                offset = of_x * OFFSET
        elif KIND == "int4":
            offset = mma_v2(gl.full([PIECE, UNIT], OFFSET, gl.bfloat16, operand), x, none)
        weights = unpacked(packed[unit].index(turn).load(read), operand, KIND, False)
        product = mma_v2(weights, x, none)
        if KIND == "int4":
            product += offset
        scale = factors[unit].index(turn).reshape([PIECE]).load(of_row).to(gl.float32)
        shift = added[unit].index(turn).reshape([PIECE]).load(of_row).to(gl.float32)
        total = _scaled(total, product, of_x, scale, shift, SHIFTS)
    return total


@gluon.jit
def _small_by_wgmma(
    total, values, packed, factors, added, turn, read: gl.constexpr, UNITS: gl.constexpr, SHIFTS: gl.constexpr,
    KIND: gl.constexpr,
):  # fmt: skip
    """One step of groups smaller than a tile by the warpgroup: weights are scaled before they are multiplied."""
    operand: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 2)
    weights = _scaled_weights(packed, factors, added, turn, 0, read, operand, SHIFTS, KIND)
    for unit in gl.static_range(UNITS):
        multiplied = weights
        across = values[unit].index(turn).permute((1, 0))
        total = warpgroup_mma(multiplied, across, total, is_async=True)
        if unit + 1 < UNITS:
            weights = _scaled_weights(packed, factors, added, turn, unit + 1, read, operand, SHIFTS, KIND)  # fmt: skip
        total, _weights = warpgroup_mma_wait(0, (total, multiplied))
    return total


@gluon.jit
def _small_by_warps(
    total, values, packed, factors, added, turn, read: gl.constexpr, UNITS: gl.constexpr, SHIFTS: gl.constexpr,
    KIND: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = total.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    across: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    for unit in gl.static_range(UNITS):
        x = values[unit].index(turn).permute((1, 0)).load(across)
        weights = _scaled_weights(packed, factors, added, turn, unit, read, operand, SHIFTS, KIND)
        total = mma_v2(weights, x, total)
    return total


@gluon.jit
def _scaled_weights(
    packed, factors, added, turn, unit: gl.constexpr, read: gl.constexpr, operand: gl.constexpr, SHIFTS: gl.constexpr,
    KIND: gl.constexpr,
):  # fmt: skip
    raw = packed[unit].index(turn).load(read)
    BYTES: gl.constexpr = of_bytes(KIND)
    TILES: gl.constexpr = raw.shape[0] // (32 if BYTES else 16)
    scales = of_words(factors[unit].index(turn), TILES, BYTES)
    shifts = None
    if SHIFTS:
        shifts = of_words(added[unit].index(turn), TILES, BYTES)
    return unpacked_and_scaled(raw, scales, shifts, operand, KIND)


@gluon.jit
def _is_last(arrived, SPLIT: gl.constexpr):
    """Whether all other programs of this tile have stored their sums; the counter is ready for the next launch then."""
    gl.thread_barrier()
    last = gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        gl.store(arrived, 0)
    return last


@gluon.jit
def _join(
    bias, y, parts, arrived, row, m0, stride_y, M, N, BM: gl.constexpr, layout: gl.constexpr, SPLIT: gl.constexpr,
    SWIGLU: gl.constexpr,
):  # fmt: skip
    """The last program of a tile adds the sums of all parts in their order, and stores the result."""
    if _is_last(arrived, SPLIT):
        n = row + gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))[:, None]
        m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(0, layout))[None, :]
        inside = (n < N) & (m < M)
        whole = gl.zeros([PIECE, BM], gl.float32, layout)
        for part in gl.static_range(SPLIT):
            at = parts + (part * M + m) * N + n
            whole += gl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        _deliver(whole, bias, None, y, row, m0, 0, stride_y, M, N, SWIGLU)


@gluon.jit
def _finish(
    total, bias, y, parts, arrived, tile, part, m0, stride_y, M, N, SPLIT: gl.constexpr, SWIGLU: gl.constexpr
):  # fmt: skip
    """Store the result; or the sums of a part, which the last program of the tile joins, or another kernel."""
    layout: gl.constexpr = total.type.layout
    BM: gl.constexpr = total.type.shape[1]
    row = tile * PIECE
    if parts is None:
        _deliver(total, bias, None, y, row, m0, 0, stride_y, M, N, SWIGLU)
    else:
        n = row + gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))[:, None]
        m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(0, layout))[None, :]
        gl.store(parts + (part * M + m) * N + n, total, mask=(n < N) & (m < M))
        if arrived is not None:
            counter = arrived + tile * gl.cdiv(M, BM) + m0 // BM
            _join(bias, y, parts, counter, row, m0, stride_y, M, N, BM, layout, SPLIT, SWIGLU)


@gluon.jit
def _multiply(
    bias, factor, y, parts, arrived, values, packed, factors, added, full, free, joined, done, tile, part, m0, count,
    stride_y, M, N, KIND: gl.constexpr, SMALL: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, SHIFTS: gl.constexpr, SWIGLU: gl.constexpr, WGMMA: gl.constexpr, GROUPS: gl.constexpr,
    ME: gl.constexpr,
):  # fmt: skip
    """One warpgroup of GROUPS: every GROUPS-th step. The first one has the sums of both in the end."""
    BM: gl.constexpr = values[0].shape[1]
    if WGMMA:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    # 16 bytes of each tile for a thread
    read: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    total = gl.zeros([PIECE, BM], gl.float32, layout)
    for step in range(ME, count, GROUPS):
        turn = step % STAGES
        mbarrier.wait(full.index(turn), step // STAGES % 2)
        if SMALL and WGMMA:
            total = _small_by_wgmma(total, values, packed, factors, added, turn, read, UNITS, SHIFTS, KIND)  # fmt: skip
        elif SMALL:
            total = _small_by_warps(total, values, packed, factors, added, turn, read, UNITS, SHIFTS, KIND)  # fmt: skip
        elif WGMMA:
            total = _by_wgmma(
                total, values, packed, factors, added, turn, read, UNITS, SHIFTS, KIND
            )
        else:
            total = _by_warps(
                total, values, packed, factors, added, turn, read, UNITS, SHIFTS, KIND
            )
        gl.thread_barrier()  # all warps have read the buffer
        mbarrier.arrive(free.index(turn), count=1)
    if ME == 1:
        joined.store(total)
        gl.thread_barrier()
        mbarrier.arrive(done.index(0), count=1)
    else:
        if GROUPS == 2:
            mbarrier.wait(done.index(0), 0)
            total += joined.load(layout)
        if KIND == "e2m1":
            total *= FLOATS
        if factor is not None:
            n = tile * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
            total *= gl.load(factor + n)[:, None]
        _finish(total, bias, y, parts, arrived, tile, part, m0, stride_y, M, N, SPLIT, SWIGLU)


@gluon.jit
def packed_kernel(
    x, w, scales, shifts, factor, bias, y, parts, arrived, stride_y, M, N, K,
    KIND: gl.constexpr, GROUP: gl.constexpr, UNITS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    WGMMA: gl.constexpr, GROUPS: gl.constexpr, REGISTERS: gl.constexpr, SWIGLU: gl.constexpr, OVERLAP: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    BM: gl.constexpr = x.block_type.shape[0]
    SHIFTS: gl.constexpr = shifts is not None
    SMALL: gl.constexpr = GROUP < PIECE  # groups
    if OVERLAP:
        gdc_launch_dependents()
    blocks = gl.cdiv(M, BM)
    m0 = gl.program_id(0) % blocks * BM
    tile = gl.program_id(0) // blocks // SPLIT
    part = gl.program_id(0) // blocks % SPLIT
    steps = K // (UNITS * x.block_type.shape[1])
    begin = steps * part // SPLIT
    count = steps * (part + 1) // SPLIT - begin
    values = _rings(x, UNITS, STAGES)
    packed = _rings(w, UNITS, STAGES)
    factors = _rings(scales, UNITS, STAGES)
    added = _rings(scales, UNITS, STAGES) if SHIFTS else factors
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    # A barrier that nobody uses must not be made (`attention_rings.barriers`): the copying warp got what the barrier
    # left in the memory of its number of steps, and copied without end.
    done, joined = full, full
    if GROUPS == 2:
        done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(done.index(0), count=1)
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        joined = gl.allocate_shared_memory(gl.float32, [PIECE, BM], flat)
    if GROUPS == 1:
        gl.warp_specialize([
            (_multiply, (bias, factor, y, parts, arrived, values, packed, factors, added, full, free, joined, done,
                         tile, part, m0, count, stride_y, M, N, KIND, SMALL, UNITS, STAGES, SPLIT, SHIFTS, SWIGLU,
                         WGMMA, 1, 0)),
            (_copy, (x, w, scales, shifts, values, packed, factors, added, full, free, tile, m0, begin, count,
                     K // PIECE, GROUP, UNITS, STAGES, OVERLAP, EARLY)),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (bias, factor, y, parts, arrived, values, packed, factors, added, full, free, joined, done,
                         tile, part, m0, count, stride_y, M, N, KIND, SMALL, UNITS, STAGES, SPLIT, SHIFTS, SWIGLU,
                         WGMMA, 2, 0)),
            (_multiply, (bias, factor, y, parts, arrived, values, packed, factors, added, full, free, joined, done,
                         tile, part, m0, count, stride_y, M, N, KIND, SMALL, UNITS, STAGES, SPLIT, SHIFTS, SWIGLU,
                         WGMMA, 2, 1)),
            (_copy, (x, w, scales, shifts, values, packed, factors, added, full, free, tile, m0, begin, count,
                     K // PIECE, GROUP, UNITS, STAGES, OVERLAP, EARLY)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
