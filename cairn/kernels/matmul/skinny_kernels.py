"""Two kernels behind skinny_matmul, whose head says what it computes: one row of x, and the one that joins parts.

A program of `row_kernel` has asked for all of its weights before it waits for its predecessor, and keeps them in
registers: what is left then is to read x, to multiply on the ordinary cores, and to store. With SwiGLU half of its rows
are of the gate and half are those of up that belong to them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _store(sums, n, m, bias, residual, y, stride_r, stride_y, N):
    if bias is not None:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if residual is not None:
        sums += tl.load(residual + m * stride_r + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + m * stride_y + n, sums.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def _swiglu(gate, up, bias, n, N):
    """n counts pairs, of which there are N."""
    if bias is not None:
        gate += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def row_kernel(
    x, w, scale_w, bias, residual, y, stride_w, N, K,
    BN: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr,
    SWIGLU: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    HALF: tl.constexpr = BN // 2
    i = tl.arange(0, BN)
    if SWIGLU:
        n = tl.program_id(0) * HALF + i % HALF + i // HALF * (N // 2)
    else:
        n = tl.program_id(0) * BN + i
    rows = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride_w
    held = ()
    for chunk in tl.static_range(CHUNKS):
        k = chunk * BK + tl.arange(0, BK)[None, :]
        part = tl.load(rows + k, mask=k < K, other=0.0, eviction_policy="evict_first")
        held = held + (part,)  # noqa: RUF005  the compiler takes no star
    if OVERLAP and EARLY:
        gdc_wait()
    # 16 bytes of neighbours belong to one thread: adding those up first leaves few sums to keep.
    NEAR: tl.constexpr = 128 // w.dtype.element_ty.primitive_bitwidth
    sums = tl.zeros([BN, BK // NEAR], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        k = chunk * BK + tl.arange(0, BK)
        values = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        product = held[chunk].to(tl.float32) * values[None, :]
        sums += tl.sum(tl.reshape(product, (BN, BK // NEAR, NEAR)), axis=2)
    total = tl.sum(sums, axis=1)
    if scale_w is not None:  # weights are float8, with a scale for each row
        total *= tl.load(scale_w + n, mask=n < N, other=0.0)
    if SWIGLU:
        pair = tl.program_id(0) * HALF + tl.arange(0, HALF)
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, HALF)), (1, 0)))
        result = _swiglu(gate, up, bias, pair, N // 2)
        _store(result, pair, 0, None, residual, y, 0, 0, N // 2)
    else:
        _store(total, n, 0, bias, residual, y, 0, 0, N)


@triton.jit
def join_kernel(
    parts, bias, residual, y, stride_r, stride_y, M, N,
    PARTS: tl.constexpr, SWIGLU: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row of x, BLOCK columns of y: the parts' sums in order, then what follows."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    width = 2 * N if SWIGLU else N
    total = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        at = parts + (part * M + m) * width + n
        total += tl.load(at, mask=n < N, other=0.0)
        if SWIGLU:
            up += tl.load(at + N, mask=n < N, other=0.0)
    if SWIGLU:
        total = _swiglu(total, up, bias, n, N)
        _store(total, n, m, None, residual, y, stride_r, stride_y, N)
    else:
        _store(total, n, m, bias, residual, y, stride_r, stride_y, N)
