# pyrefly: ignore-errors
"""The kernel of skinny_matmul for one row of x, in Gluon for sm_90: x lies in the registers that its weights need.

A program has asked for all of its weights before it waits for its predecessor, and keeps them in registers: what is
left then is to read x, to multiply on the ordinary cores, and to store. A thread has 16 bytes of neighbours of each row
of w, and the numbers of x that belong to them: nothing goes through shared memory but the sums of the warps. With
SwiGLU half of its rows are of the gate and half are those of up that belong to them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def _biased(sums, bias, n, N):
    if bias is not None:
        sums += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
    return sums


@gluon.jit
def one_row_kernel(
    x, w, scale_w, bias, residual, y, stride_w, N, K,
    BN: gl.constexpr, BK: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr,
    SWIGLU: gl.constexpr, OVERLAP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    NEAR: gl.constexpr = 128 // w.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, NEAR], [1, 32], [1, WARPS], [1, 0])
    if OVERLAP:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    HALF: gl.constexpr = BN // 2
    i = gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
    if SWIGLU:
        n = gl.program_id(0) * HALF + i % HALF + i // HALF * (N // 2)
    else:
        n = gl.program_id(0) * BN + i
    rows = w + gl.minimum(n, N - 1).to(gl.int64)[:, None] * stride_w
    held = ()
    for chunk in gl.static_range(CHUNKS):
        k = chunk * BK + columns
        part = gl.load(
            rows + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first"
        )
        held = held + (part,)  # noqa: RUF005  the compiler takes no star
    if OVERLAP and EARLY:
        gdc_wait()
    given = ()
    for chunk in gl.static_range(CHUNKS):
        k = chunk * BK + columns
        given = given + (gl.load(x + k, mask=k < K, other=0.0),)  # noqa: RUF005
    product = held[0].to(gl.float32) * given[0].to(gl.float32)[None, :]
    sums = gl.sum(product.reshape([BN, BK // NEAR, NEAR]), axis=2)
    for chunk in gl.static_range(CHUNKS - 1):
        product = held[chunk + 1].to(gl.float32) * given[chunk + 1].to(gl.float32)[None, :]
        sums += gl.sum(product.reshape([BN, BK // NEAR, NEAR]), axis=2)
    total = gl.convert_layout(gl.sum(sums, axis=1), gl.SliceLayout(1, layout))
    if scale_w is not None:  # weights are float8, with a scale for each row
        total *= gl.load(scale_w + n, mask=n < N, other=0.0)
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
