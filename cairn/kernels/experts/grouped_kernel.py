"""The kernel of `grouped_matmul`: one tile of one expert's tokens times some rows of its matrix.

    x, w in 16 bits      w is the tall side where an expert has few tokens, so that 16 of them waste nothing
    x, w in float8       the same, with scales of rows on the way out
    w in MXFP4           always tall: codes are unpacked in registers, which only the tall side may come from

`matrices` says how forms of w lie in memory.
"""

import triton
import triton.language as tl

from cairn.kernels.dependent import begin

ALPHA = tl.constexpr(1.702)  # of the clamped SwiGLU
HALF_TILE = tl.constexpr(64)  # columns of a tile of MXFP4 that lie in the same halves of bytes


@triton.jit
def expert_blocks(ends, COUNT: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr):
    """Of each expert: its number, where its rows start and end, how many blocks of BM they are, and up to it."""
    e = tl.arange(0, WIDTH)
    end = tl.load(ends + e, mask=e < COUNT, other=0)
    start = tl.load(ends + e - 1, mask=(e > 0) & (e < COUNT), other=0)
    blocks = tl.where(e < COUNT, (end - start + BM - 1) // BM, 0)
    behind = tl.cumsum(blocks, axis=0)
    return e, start, end, blocks, behind


@triton.jit
def _tile_of(ends, tile, COUNT: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr):
    """The expert of a tile, the tile's first row, and where the expert's rows end. Expert COUNT: no such tile."""
    e, start, end, blocks, behind = expert_blocks(ends, COUNT, WIDTH, BM)
    expert = tl.sum(((behind <= tile) & (e < COUNT)).to(tl.int32), axis=0)
    mine = e == expert
    first = tl.sum(tl.where(mine, start + (tile - behind + blocks) * BM, 0), axis=0)
    return expert, first, tl.sum(tl.where(mine, end, 0), axis=0)


@triton.jit
def _dot(w, x, sums, TALL: tl.constexpr):
    if TALL:
        return tl.dot(w, x.T, sums)
    else:
        return tl.dot(x, w.T, sums)


@triton.jit
def _factor(exponent):
    """2 ** (exponent - 1) in bfloat16."""
    return ((exponent.to(tl.uint16) + 126) << 7).to(tl.bfloat16, bitcast=True)


@triton.jit
def _unpacked(code, first, second):
    """Codes of e2m1 times the factors of their groups.

    The three bits of the magnitude, at the border of bfloat16's exponent and fraction, are the number times 2 ** -126,
    subnormal ones too; the factor has that power in it.
    """
    bits = ((code & 7).to(tl.uint16) << 6) | ((code & 8).to(tl.uint16) << 12)
    in_first = tl.arange(0, HALF_TILE)[None, :] < HALF_TILE // 2
    factor = tl.where(in_first, first[:, None], second[:, None])
    return bits.to(tl.bfloat16, bitcast=True) * factor


@triton.jit
def _factors(scales, k0, K, row, N):
    """Of the four groups in 128 columns from k0. `scales`: of one expert, N rows apart by group."""
    at = scales + k0 // 32 * N + row
    inside = (row < N) & (k0 < K)
    first = tl.load(at, mask=inside, other=127)
    second = tl.load(at + N, mask=inside, other=127)
    third = tl.load(at + 2 * N, mask=inside, other=127)
    fourth = tl.load(at + 3 * N, mask=inside, other=127)
    return first, second, third, fourth


@triton.jit
def _dot_mxfp4(raw, first, second, third, fourth, low, high, sums):
    sums = tl.dot(_unpacked(raw & 15, _factor(first), _factor(second)), low.T, sums)
    return tl.dot(_unpacked(raw >> 4, _factor(third), _factor(fourth)), high.T, sums)


@triton.jit
def _scaled(sums, w_scales, x_scales, bias, at, source, real, row, N, TALL: tl.constexpr):
    """The result [BM, BN]: a float8 product times its scales, plus the bias of the expert."""
    result = sums.T if TALL else sums
    if w_scales is not None:
        result *= tl.load(w_scales + at + row, mask=row < N, other=0.0)[None, :]
        result *= tl.load(x_scales + source, mask=real, other=0.0)[:, None]
    if bias is not None:
        result += tl.load(bias + at + row, mask=row < N, other=0.0).to(tl.float32)[None, :]
    return result


@triton.jit
def _gated(gate, up, limit, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["tokens"])
def _grouped_kernel(
    x, w, y, order, ends, weights, x_scales, w_scales, bias, stride_x, tokens, N, K, limit,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr, GATHER: tl.constexpr,
    SWIGLU: tl.constexpr, CLAMPED: tl.constexpr, MXFP4: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """N columns of y. With SwiGLU each expert's matrix has 2 * N rows. `weights`: y is parts [PER_TOKEN, tokens, N].

    Without an `order`, `ends` has the expert of each pair.
    """
    begin(OVERLAP)
    n0 = tl.program_id(0) * BN
    tile = tl.program_id(1)
    if order is None:
        expert, first, end = tl.load(ends + tile), tile, tile + 1
    else:
        expert, first, end = _tile_of(ends, tile, COUNT, WIDTH, BM)
    if (expert >= 0) & (expert < COUNT):
        row = first + tl.arange(0, BM)
        real = row < end
        pair = row if order is None else tl.load(order + row, mask=real, other=0)
        source = pair // PER_TOKEN if GATHER else row
        rows = x + source.to(tl.int64)[:, None] * stride_x
        of_expert = expert * (2 * N if SWIGLU else N)
        at = of_expert + n0
        n = n0 + tl.arange(0, BN)
        sums = tl.zeros([BN, BM] if TALL else [BM, BN], tl.float32)
        up = tl.zeros([BN, BM] if TALL else [BM, BN], tl.float32)
        if MXFP4:
            height = 2 * N if SWIGLU else N  # of a matrix
            scales = w_scales + expert.to(tl.int64) * (tl.cdiv(K, BK) * 4) * height
            # Scales are asked for one step ahead: they are too small to be pipelined by the compiler.
            a, b, c, d = _factors(scales, 0, K, n, height)
            e, f, g, h = a, b, c, d
            next_e, next_f, next_g, next_h = a, b, c, d
            if SWIGLU:
                e, f, g, h = _factors(scales, 0, K, n + N, height)
            for k0 in range(0, K, BK):
                next_a, next_b, next_c, next_d = _factors(scales, k0 + BK, K, n, height)
                if SWIGLU:
                    next_e, next_f, next_g, next_h = _factors(scales, k0 + BK, K, n + N, height)
                k = k0 + tl.arange(0, HALF_TILE)
                low = tl.load(rows + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0)
                k += HALF_TILE
                high = tl.load(rows + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0)
                sums = _dot_mxfp4(w.load([at, k0 // 2]), a, b, c, d, low, high, sums)
                a, b, c, d = next_a, next_b, next_c, next_d
                if SWIGLU:
                    up = _dot_mxfp4(w.load([at + N, k0 // 2]), e, f, g, h, low, high, up)
                    e, f, g, h = next_e, next_f, next_g, next_h
        else:
            for k0 in range(0, K, BK):
                k = k0 + tl.arange(0, BK)
                known = real[:, None] if EVEN else real[:, None] & (k < K)[None, :]
                part = tl.load(rows + k[None, :], mask=known, other=0.0)
                sums = _dot(w.load([at, k0]), part, sums, TALL)
                if SWIGLU:
                    up = _dot(w.load([at + N, k0]), part, up, TALL)
        factors = None if MXFP4 else w_scales
        result = _scaled(sums, factors, x_scales, bias, of_expert, source, real, n, N, TALL)
        if SWIGLU:
            up_result = _scaled(
                up, factors, x_scales, bias, of_expert, source, real, n + N, 2 * N, TALL
            )
            result = _gated(result, up_result, limit, CLAMPED)
        inside = real[:, None] & (n < N)[None, :]
        if weights is None:
            out = y + row.to(tl.int64)[:, None] * N + n[None, :]
        else:
            result *= tl.load(weights + pair, mask=real, other=0.0)[:, None]
            place = pair % PER_TOKEN * tokens + pair // PER_TOKEN
            out = y + place.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, result.to(y.dtype.element_ty), mask=inside)
