"""A few tokens through MXFP4 experts: each pair of token and expert alone, on the ordinary cores.

    word of w: 8 codes  -shift, mask-> 8 float32  * 8 numbers of x  -> two sums, one for each group's scale

One token's four experts of gpt-oss are 50 MB a layer, and a tile for the tensor cores would be empty but for one row.
Here a program asks for all words of a few rows of a matrix at once, so that many bytes are under way, and keeps them in
registers: nothing goes through shared memory. A code becomes a number in three instructions (`_number`), which is what
the kernel waits for besides the memory. `grouped_matmul` launches it for `FewPairs`; `matrices` says how codes lie.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.dependent import begin, pdl
from cairn.kernels.experts.matrices import Mxfp4Experts

ALPHA = tl.constexpr(1.702)  # of the clamped SwiGLU
KEPT = tl.constexpr(
    -0x7E400000
)  # 0x81C00000: the sign, and where e2m1's three bits are in a float32
UPPER = tl.constexpr(-0x10000)  # 0xFFFF0000: the second of two bfloat16, as a float32
TILE_WORDS = tl.constexpr(
    16
)  # of a row, whose low halves are 64 columns and whose high halves the next 64
NEAR = tl.constexpr(4)  # words of 16 bytes
RAISED = tl.constexpr(
    2.0**64
)  # x by so much: numbers of w are 2 ** -126 too small, and products would be subnormal
FACTOR = tl.constexpr(62)  # 126 - 64: brings both back, in the exponent of a factor


class FewTiles(NamedTuple):
    rows: int  # of a matrix, and with a gate so many of gate and of up
    warps: int
    words: int = 128  # of a row at a time


GATED, PLAIN = FewTiles(2, 1), FewTiles(4, 1)


@triton.jit
def _number(word, PLACE: tl.constexpr):
    """Code PLACE of a word times 2 ** -126: its sign fills the bits above its magnitude, and the mask keeps one."""
    return (((word << (28 - 4 * PLACE)) >> 6) & KEPT).to(tl.float32, bitcast=True)


@triton.jit
def _four(x, at, inside):
    """Four neighbours of x as float32."""
    both = tl.load(x + at, mask=inside, other=0)
    first, second = both.to(tl.int32), (both >> 32).to(tl.int32)
    a = (first << 16).to(tl.float32, bitcast=True) * RAISED
    b = (first & UPPER).to(tl.float32, bitcast=True) * RAISED
    c = (second << 16).to(tl.float32, bitcast=True) * RAISED
    d = (second & UPPER).to(tl.float32, bitcast=True) * RAISED
    return a[None, :], b[None, :], c[None, :], d[None, :]


@triton.jit
def _factor(scales, group, n, N, inside):
    exponent = tl.load(scales + group[None, :] * N + n[:, None], mask=inside, other=127)
    return ((exponent.to(tl.int32) + FACTOR) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _near(y, BN: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of the four neighbouring words that belong to one thread: few are left to keep and to scale."""
    return tl.sum(tl.reshape(y, (BN, BLOCK // NEAR, NEAR)), axis=2)


@triton.jit
def _products(
    word, scales, group, n, N, inside, low_x, high_x, BN: tl.constexpr, BLOCK: tl.constexpr
):
    """Of four words of each row: columns in low halves of bytes have one scale, those in high halves another."""
    low = _number(word, 0) * low_x[0]
    low = _number(word, 2) * low_x[1] + low
    low = _number(word, 4) * low_x[2] + low
    low = _number(word, 6) * low_x[3] + low
    high = _number(word, 1) * high_x[0]
    high = _number(word, 3) * high_x[1] + high
    high = _number(word, 5) * high_x[2] + high
    high = _number(word, 7) * high_x[3] + high
    sums = _near(low, BN, BLOCK) * _factor(scales, group, n, N, inside)
    return _near(high, BN, BLOCK) * _factor(scales, group + 2, n, N, inside) + sums


@triton.jit
def _asked(w, n, N, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """All words of rows n of a matrix, in chunks."""
    rows = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * WORDS
    held = ()
    for first in tl.static_range(0, WORDS, BLOCK):
        word = first + tl.arange(0, BLOCK)[None, :]
        part = tl.load(rows + word, mask=word < WORDS, other=0, eviction_policy="evict_first")
        held = held + (part,)  # noqa: RUF005  the compiler takes no star
    return held


@triton.jit
def _biased(sums, bias, n, N):
    if bias is not None:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    return sums


@triton.jit(do_not_specialize=["tokens"])
def _few_kernel(
    x,
    w,
    scales,
    y,
    experts,
    weights,
    bias,
    stride_x,
    tokens,
    N,
    QUARTER,
    limit,
    COUNT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    WORDS: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """QUARTER: units of 8 bytes in a row of x. N: columns of y. `weights`: y is parts [PER_TOKEN, tokens, N]."""
    begin(OVERLAP)
    pair = tl.program_id(1)
    expert = tl.load(experts + pair)
    if (expert >= 0) & (expert < COUNT):
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        height = 2 * N if GATED else N
        of_expert = expert.to(tl.int64) * height
        held = _asked(w + of_expert * WORDS, n, height, WORDS, BLOCK)
        held_up = held
        if GATED:
            held_up = _asked(w + of_expert * WORDS, n + N, height, WORDS, BLOCK)
        scales += of_expert * (WORDS // 4)  # a group has the codes of four words
        row = x + (pair // PER_TOKEN if GATHER else pair).to(tl.int64) * stride_x
        sums = tl.zeros([BN, BLOCK // NEAR], tl.float32)
        ups = tl.zeros([BN, BLOCK // NEAR], tl.float32)
        for chunk in tl.static_range((WORDS + BLOCK - 1) // BLOCK):
            word = chunk * BLOCK + tl.arange(0, BLOCK)
            at = word // TILE_WORDS * 2 * TILE_WORDS + word % TILE_WORDS
            low_x = _four(row, at, at < QUARTER)
            high_x = _four(row, at + TILE_WORDS, at + TILE_WORDS < QUARTER)
            first = chunk * BLOCK + NEAR * tl.arange(0, BLOCK // NEAR)
            group = first // TILE_WORDS * 4 + first % TILE_WORDS // 8
            inside = (n < N)[:, None] & (first < WORDS)[None, :]
            sums += _products(
                held[chunk], scales, group, n, height, inside, low_x, high_x, BN, BLOCK
            )
            if GATED:
                ups += _products(
                    held_up[chunk], scales, group, n + N, height, inside, low_x, high_x, BN, BLOCK
                )
        if bias is not None:
            bias += of_expert
        result = _biased(tl.sum(sums, axis=1), bias, n, height)
        if GATED:
            up = _biased(tl.sum(ups, axis=1), bias, n + N, height)
            if CLAMPED:
                result = tl.minimum(result, limit)
                up = tl.minimum(tl.maximum(up, -limit), limit)
                result = result / (1.0 + tl.exp(-ALPHA * result)) * (up + 1.0)
            else:
                result = result / (1.0 + tl.exp(-result)) * up
        place = pair
        if weights is not None:
            result *= tl.load(weights + pair)
            place = pair % PER_TOKEN * tokens + pair // PER_TOKEN
        out = y + place.to(tl.int64) * N + n
        tl.store(out, result.to(y.dtype.element_ty), mask=n < N)


def suits(x: Tensor, w: Mxfp4Experts) -> bool:
    """Rows of x are read 8 bytes at a time."""
    return x.dtype == torch.bfloat16 and w.columns % 4 == 0 and x.data_ptr() % 16 == 0


def launch(
    x: Tensor,
    w: Mxfp4Experts,
    y: Tensor,
    experts_P: Tensor,
    per_token: int,
    weights_TK: Tensor | None,
    bias_EN: Tensor | None,
    gather: bool,
    limit: float | None,
    tiles: FewTiles | None = None,
) -> None:
    """`limit`: of a gate, 0 for SwiGLU; None: there is no gate."""
    total, columns, quarters = len(experts_P), y.shape[-1], x.view(torch.int64)
    tiles = tiles or (PLAIN if limit is None else GATED)
    kernel: Any = _few_kernel
    kernel[(triton.cdiv(columns, tiles.rows), total)](
        quarters,
        w.packed_ENB.view(torch.int32),
        w.scale_EGN,
        y,
        experts_P,
        weights_TK,
        bias_EN,
        quarters.stride(0),
        total // per_token,
        columns,
        quarters.shape[1],
        limit or 0.0,
        **constants(w.shape[0], per_token, w.packed_ENB.shape[2] // 4, gather, limit, tiles),
        num_warps=tiles.warps,
        **pdl(x.device),
    )


def constants(
    count: int, per_token: int, words: int, gather: bool, limit: float | None, tiles: FewTiles
) -> dict[str, int | bool]:
    return {
        "COUNT": count,
        "PER_TOKEN": per_token,
        "GATHER": gather,
        "GATED": limit is not None,
        "CLAMPED": bool(limit),
        "WORDS": words,
        "BN": tiles.rows,
        "BLOCK": tiles.words,
    }
