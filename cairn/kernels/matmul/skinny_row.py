# pyrefly: ignore-errors
"""The kernel of skinny_matmul for one row of x, in Gluon for sm_90: x lies in the registers that its weights need.

A program has asked for all of its weights before it waits for its predecessor, and keeps them in registers: what is
left then is to read x, to multiply on the ordinary cores, and to store. A thread has 16 bytes of neighbours of each row
of w, and the numbers of x that belong to them: nothing goes through shared memory but the sums of the warps. With
SwiGLU half of its rows are of the gate and half are those of up that belong to them. Weights of float8 have a scale for
each row, or for each block of 128 x 128 (BLOCKS).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.matmul.skinny_stream import BLOCK


@gluon.jit
def _numbers(N, BN: gl.constexpr, layout: gl.constexpr, SWIGLU: gl.constexpr):
    """Which rows of w the program has."""
    i = gl.arange(0, BN, layout=layout)
    if SWIGLU:
        HALF: gl.constexpr = BN // 2
        return gl.program_id(0) * HALF + i % HALF + i // HALF * (N // 2)
    else:
        return gl.program_id(0) * BN + i


@gluon.jit
def _near(
    held, given, scales, chunk: gl.constexpr, N, K, NEAR: gl.constexpr, BLOCKS: gl.constexpr, SWIGLU: gl.constexpr
):  # fmt: skip
    """Sums [BN, BK / NEAR] over what a thread has of each row: few to keep. Blocks of 128 x 128 have scales."""
    BN: gl.constexpr = held.shape[0]
    BK: gl.constexpr = held.shape[1]
    product = held.to(gl.float32) * given.to(gl.float32)[None, :]
    sums = gl.sum(product.reshape([BN, BK // NEAR, NEAR]), axis=2)
    if BLOCKS:
        layout: gl.constexpr = sums.type.layout
        n = _numbers(N, BN, gl.SliceLayout(1, layout), SWIGLU)
        k = chunk * BK + NEAR * gl.arange(0, BK // NEAR, layout=gl.SliceLayout(0, layout))
        at = (gl.minimum(n, N - 1) // BLOCK * (K // BLOCK))[:, None] + (k // BLOCK)[None, :]
        sums *= gl.load(scales + at, mask=(k < K)[None, :], other=0.0)
    return sums


@gluon.jit
def _biased(sums, bias, n, N):
    if bias is not None:
        sums += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
    return sums


@gluon.jit
def one_row_kernel(
    x, w, scale_w, bias, residual, y, stride_w, N, K,
    BN: gl.constexpr, BK: gl.constexpr, CHUNKS: gl.constexpr, WHOLE: gl.constexpr, WARPS: gl.constexpr,
    BLOCKS: gl.constexpr, SWIGLU: gl.constexpr, OVERLAP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    NEAR: gl.constexpr = 128 // w.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, NEAR], [1, 32], [1, WARPS], [1, 0])
    if OVERLAP:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    HALF: gl.constexpr = BN // 2
    columns = gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
    n = _numbers(N, BN, gl.SliceLayout(1, layout), SWIGLU)
    rows = w + gl.minimum(n, N - 1).to(gl.int64)[:, None] * stride_w
    held = ()
    for chunk in gl.static_range(CHUNKS):
        k = chunk * BK + columns
        if WHOLE:
            part = gl.load(rows + k[None, :], eviction_policy="evict_first")
        else:
            inside = (k < K)[None, :]
            part = gl.load(rows + k[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        held = held + (part,)  # noqa: RUF005  the compiler takes no star
    # Scales come from the memory as weights do: asked for behind the product they would be waited for.
    if scale_w is not None and not BLOCKS:
        factors = gl.load(scale_w + n, mask=n < N, other=0.0)
    if OVERLAP and EARLY:
        gdc_wait()
    given = ()
    for chunk in gl.static_range(CHUNKS):
        k = chunk * BK + columns
        if WHOLE:
            given = given + (gl.load(x + k),)  # noqa: RUF005
        else:
            given = given + (gl.load(x + k, mask=k < K, other=0.0),)  # noqa: RUF005
    sums = _near(held[0], given[0], scale_w, 0, N, K, NEAR, BLOCKS, SWIGLU)
    for chunk in gl.static_range(1, CHUNKS):
        sums += _near(held[chunk], given[chunk], scale_w, chunk, N, K, NEAR, BLOCKS, SWIGLU)
    total = gl.convert_layout(gl.sum(sums, axis=1), gl.SliceLayout(1, layout))
    if scale_w is not None and not BLOCKS:  # weights are float8, with a scale for each row
        total *= factors
    total = _biased(total, bias, n, N)
    if SWIGLU:
        gate, up = gl.split(total.reshape([2, HALF]).permute((1, 0)))
        result = gate / (1.0 + gl.exp(-gate)) * up
        at = gl.program_id(0) * HALF + gl.arange(0, HALF, layout=result.type.layout)
        limit = N // 2
    else:
        result = total
        at = n
        limit = N
    if residual is not None:
        result += gl.load(residual + at, mask=at < limit, other=0.0).to(gl.float32)
    gl.store(y + at, result.to(y.dtype.element_ty), mask=at < limit)
