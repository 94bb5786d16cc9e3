"""The kernels behind skinny_matmul, whose head says what they compute and why there are three.

Each starts while its predecessor may still be running. What comes before `gdc_wait` must not depend on it: weights
are only asked into the L2 cache, where a late write would still be seen.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _begin(w, stride_w, n0, k0, N, BN: tl.constexpr, COLUMNS: tl.constexpr, THREADS: tl.constexpr):
    """Let the successor start, ask for COLUMNS of BN rows of w, one piece per thread, wait for the predecessor."""
    gdc_launch_dependents()
    if COLUMNS > 0:
        PIECES: tl.constexpr = THREADS // BN
        piece = tl.arange(0, THREADS)
        row = tl.minimum(n0 + piece // PIECES, N - 1).to(tl.int64)
        at = row * stride_w + k0 + piece % PIECES * (COLUMNS // PIECES)
        size = tl.full([THREADS], COLUMNS // PIECES * 2, tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [w + at, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    gdc_wait()


@triton.jit
def _deliver(sums, n, m, bias, residual, y, stride_r, stride_y, M, N):
    """bias, residual and the store of sums, whose shape n and m broadcast to."""
    inside = (n < N) & (m < M)
    if bias is not None:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if residual is not None:
        sums += tl.load(residual + m * stride_r + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + m * stride_y + n, sums.to(y.dtype.element_ty), mask=inside)


@triton.jit
def rows_kernel(
    x, w, bias, residual, y, stride_x, stride_w, stride_r, stride_y, M, N, K,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr, COLUMNS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    n0 = tl.program_id(0) * BN
    if OVERLAP:
        _begin(w, stride_w, n0, 0, N, BN, COLUMNS, THREADS)
    n = n0 + tl.arange(0, BN)
    weights = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride_w
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros([BN, BK // 8], tl.float32),)  # noqa: RUF005  the compiler takes no star
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        inside = k < K
        part = tl.load(
            weights + k[None, :], mask=inside[None, :], other=0.0, eviction_policy="evict_first"
        )
        # Eight neighbours belong to one thread: adding them up first leaves few sums to keep.
        further = ()
        for m in tl.static_range(ROWS):
            values = tl.load(x + m * stride_x + k, mask=inside & (m < M), other=0.0)
            product = part.to(tl.float32) * values.to(tl.float32)[None, :]
            total = sums[m] + tl.sum(tl.reshape(product, (BN, BK // 8, 8)), axis=2)
            further = further + (total,)  # noqa: RUF005
        sums = further
    for m in tl.static_range(ROWS):
        _deliver(tl.sum(sums[m], axis=1), n, m, bias, residual, y, stride_r, stride_y, M, N)


@triton.jit
def tiles_kernel(
    x, w, w_pointer, bias, residual, y, parts, counters, stride_w, stride_r, stride_y, M, N, slab,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    OVERLAP: tl.constexpr, COLUMNS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    tl.assume(slab > 0)  # without it ptxas waits after each product
    n0 = tl.program_id(0) * BN
    part = tl.program_id(1)
    if OVERLAP:
        _begin(w_pointer, stride_w, n0, part * slab, N, BN, COLUMNS, THREADS)
    sums = tl.zeros([BN, BM], tl.float32)
    for k in range(part * slab, (part + 1) * slab, BK):  # beyond K there are zeros
        sums = tl.dot(w.load([n0, k]), x.load([0, k]).T, sums)
    n = n0 + tl.arange(0, BN)[:, None]
    m = tl.arange(0, BM)[None, :]
    if parts is None:
        _deliver(sums, n, m, bias, residual, y, stride_r, stride_y, M, N)
    else:
        inside = (n < N) & (m < M)
        at = m * N + n
        tl.store(parts + part * M * N + at, sums, mask=inside)
        if counters is not None:
            tl.debug_barrier()  # every thread's sums are written before one thread says so
            before = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
            if before == PARTS - 1:
                total = tl.zeros([BN, BM], tl.float32)
                for other in tl.static_range(PARTS):  # also its own: always the same order
                    total += tl.load(
                        parts + other * M * N + at, mask=inside, other=0.0, cache_modifier=".cg"
                    )
                _deliver(total, n, m, bias, residual, y, stride_r, stride_y, M, N)
                tl.store(counters + tl.program_id(0), 0)  # ready for the next call


@triton.jit
def join_kernel(
    parts, bias, residual, y, stride_r, stride_y, M, N,
    PARTS: tl.constexpr, SWIGLU: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row of x, BLOCK columns of y: the slabs' sums in order, then what follows."""
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
        if bias is not None:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
            up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
        total = total / (1.0 + tl.exp(-total)) * up
        _deliver(total, n, m, None, residual, y, stride_r, stride_y, M, N)
    else:
        _deliver(total, n, m, bias, residual, y, stride_r, stride_y, M, N)
