"""Embedding lookup and the gradient of its table.

    forward    x[t] = weight[token[t] - first]; zero for a token that another rank holds (vocabulary in parallel)
    backward   d[v] = sum of the gradients of all t with token v

The backward sorts the tokens, so that equal ones become neighbours, and cuts their order into chunks. The program at
the first of a run adds it up in float32, always in the same order, and writes the row once. Where a run crosses into
other chunks (a frequent token) each chunk's program keeps its part, and a second kernel adds the parts up: nobody has
more than a chunk to do one after the other. No atomics, so the result is the same in every run. Bytes moved: forward
2*T*D elements, backward T*D and the rows written, plus the zeros of all other rows unless it adds to a buffer of the
caller.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from cairn.kernels.arguments import FLOATS, INTEGERS, as_rows, check, output, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import blocks, launch, width
from cairn.kernels.tuned import tuned

DEFAULT = {"block": 2048, "warps": 4}
DEFAULT_BACKWARD = {"block": 4096, "chunk": 32, "warps": 4}
_TOGETHER = 8  # parts that are on their way at the same time


def embedding_reference(tokens: Tensor, weight_VD: Tensor, first: int = 0) -> Tensor:
    local = tokens.long() - first
    mine = (local >= 0) & (local < len(weight_VD))
    return F.embedding(local.where(mine, 0), weight_VD) * mine[..., None]


def embedding_backward_reference(
    grad_TD: Tensor, tokens_T: Tensor, d_VD: Tensor, first: int = 0
) -> Tensor:
    """Adds to d; in float32 where the gradient is narrower."""
    local = tokens_T.long() - first
    mine = (local >= 0) & (local < len(d_VD))
    wide = torch.float64 if grad_TD.dtype == torch.float64 else torch.float32
    total = torch.zeros(d_VD.shape, dtype=wide, device=d_VD.device)
    total.index_add_(0, local[mine], grad_TD[mine].to(wide))
    return d_VD.copy_(d_VD + total)


@triton.jit
def _gather_kernel(
    tokens, weight, x, first, vocab, weight_stride, x_stride,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tl.cdiv(COLUMNS, BLOCK)).to(tl.int64)
    column = tl.program_id(0) % tl.cdiv(COLUMNS, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    local = tl.load(tokens + row).to(tl.int64) - first
    mine = (local >= 0) & (local < vocab)
    found = tl.load(weight + local * weight_stride + column, mask=inside & mine, other=0.0)
    tl.store(x + row * x_stride + column, found, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _scatter_kernel(
    grad, ordered, places, d, parts, count, first, vocab, grad_stride, d_stride,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """`ordered`: the tokens in ascending order; `places`: which tokens they were; a program for each of them.

    parts [2 * chunks, COLUMNS]: of each chunk what belongs to a run from before it, and to one that goes on after it.
    """
    here = tl.program_id(0) // tl.cdiv(COLUMNS, BLOCK)
    token = tl.load(ordered + here).to(tl.int64)
    begins = tl.load(ordered + here - 1, mask=here > 0, other=-1).to(tl.int64) != token
    begins = begins | (here == 0)
    local = token - first
    if (begins | (here % CHUNK == 0)) & (local >= 0) & (local < vocab):
        column = tl.program_id(0) % tl.cdiv(COLUMNS, BLOCK) * BLOCK + tl.arange(0, BLOCK)
        inside = column < COLUMNS
        near = here + tl.arange(0, CHUNK)
        mine = (near < count) & (near // CHUNK == here // CHUNK)
        mine = mine & (tl.load(ordered + near, mask=mine, other=-1).to(tl.int64) == token)
        end = here + tl.sum(mine.to(tl.int32))
        total = tl.zeros([BLOCK], tl.float32)
        for at in tl.range(here, end, num_stages=3):
            place = tl.load(places + at).to(tl.int64)
            found = tl.load(grad + place * grad_stride + column, mask=inside, other=0.0)
            total += found.to(tl.float32)
        goes_on = tl.load(ordered + end, mask=end < count, other=-1).to(tl.int64) == token
        if (goes_on & (end < count)) | (not begins):
            part = (here // CHUNK * 2 + begins.to(tl.int32)).to(tl.int64)
            tl.store(parts + part * COLUMNS + column, total, mask=inside)
        else:
            row = d + local * d_stride + column
            if ADD:
                total += tl.load(row, mask=inside, other=0.0).to(tl.float32)
            tl.store(row, total.to(d.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _join_kernel(
    ordered, d, parts, count, first, vocab, d_stride,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ADD: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """A program for each chunk but the last: if a run begins in it and goes on, it adds up the run's parts."""
    chunk = tl.program_id(0) // tl.cdiv(COLUMNS, BLOCK)
    after = (chunk + 1) * CHUNK
    token = tl.load(ordered + after).to(tl.int64)
    crosses = tl.load(ordered + after - 1).to(tl.int64) == token
    before = tl.load(ordered + chunk * CHUNK - 1, mask=chunk > 0, other=-1).to(tl.int64)
    begins = (before != token) | (chunk == 0)
    local = token - first
    if crosses & begins & (local >= 0) & (local < vocab):
        column = tl.program_id(0) % tl.cdiv(COLUMNS, BLOCK) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = column < COLUMNS
        own = parts + (chunk * 2 + 1).to(tl.int64) * COLUMNS
        total = tl.load(own + column, mask=inside, other=0.0)
        rest = tl.zeros([TOGETHER, BLOCK], tl.float32)
        start = chunk + 1
        going = True
        while going:
            each = start + tl.arange(0, TOGETHER)[:, None]
            same = each * CHUNK < count
            same = same & (
                tl.load(ordered + each * CHUNK, mask=same, other=-1).to(tl.int64) == token
            )
            part = parts + each.to(tl.int64) * 2 * COLUMNS + column
            rest += tl.load(part, mask=same & inside, other=0.0)
            start += TOGETHER
            going = tl.sum(same.to(tl.int32)) == TOGETHER
        total += tl.sum(rest, axis=0)[None, :]
        row = d + local * d_stride + column
        if ADD:
            total += tl.load(row, mask=inside, other=0.0).to(tl.float32)
        tl.store(row, total.to(d.dtype.element_ty), mask=inside)


def embedding(
    tokens: Tensor,
    weight: Tensor,
    first: int = 0,
    *,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """tokens [...] -> rows [..., D]. `first`: the token of row 0, where a rank holds a part. Differentiable."""
    check("tokens", tokens, dtypes=INTEGERS, packed=True, beside=weight)
    check("weight", weight, dtypes=FLOATS, shape=(None, None))
    require(weight.stride(1) == 1, "weight", "stride 1 in the last dimension", weight.stride())
    require(weight.shape[0] > 0, "weight", "at least one row", tuple(weight.shape))
    chosen = choose("embedding", impl, {"triton": needs_cuda(weight), "reference": None})
    tracked = torch.is_grad_enabled() and weight.requires_grad
    require(out is None or not tracked, "out", "none while gradients are kept", "one")
    if chosen.impl == "reference":
        x = embedding_reference(tokens, weight, first)
        return x if out is None else output("out", out, x.shape, x.dtype, x).copy_(x)
    if tracked:
        return _Embedding.apply(weight, tokens, first)
    x = output("out", out, (*tokens.shape, weight.shape[1]), weight.dtype, weight)
    _launch(tokens, weight, first, x)
    return x


def embedding_backward(
    grad: Tensor,
    tokens: Tensor,
    rows: int,
    dtype: torch.dtype,
    first: int = 0,
    *,
    into: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Gradient of the table [rows, D]; with `into` it is added to that buffer, and no zeros are written."""
    check("tokens", tokens, dtypes=INTEGERS, packed=True, beside=grad)
    check("grad", grad, dtypes=FLOATS, shape=(*tokens.shape, None), packed=True)
    columns = grad.shape[-1]
    d = into
    if d is None:
        d = torch.zeros(rows, columns, dtype=dtype, device=grad.device)
    check("into", d, dtypes=FLOATS, shape=(rows, columns), beside=grad, packed=True)
    flat, grad_TD = tokens.flatten(), grad.view(-1, columns)
    chosen = choose("embedding", impl, {"triton": needs_cuda(grad), "reference": None})
    if chosen.impl == "reference":
        return embedding_backward_reference(grad_TD, flat, d, first)
    if len(flat):
        _launch_backward(grad_TD, flat, d, first, add=into is not None)
    return d


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, first: int) -> Tensor:
        shape = (*tokens.shape, weight.shape[1])
        x = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        _launch(tokens, weight, first, x)
        ctx.save_for_backward(tokens)
        ctx.like = (weight.shape[0], weight.dtype, first)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        (tokens,) = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        return embedding_backward(grad, tokens, *ctx.like, impl="triton"), None, None


def _launch(tokens: Tensor, weight: Tensor, first: int, x: Tensor) -> None:
    x_TD = as_rows("out", x)
    rows, columns = x_TD.shape
    if not rows:
        return
    how = tuned("embedding", f"forward,{short(weight.dtype)}", DEFAULT)
    block = min(how["block"], width(columns))
    launch(
        _gather_kernel, rows * blocks(columns, block),
        tokens, weight, x_TD, first, weight.shape[0], weight.stride(0), x_TD.stride(0),
        COLUMNS=columns, BLOCK=block, num_warps=how["warps"],
    )  # fmt: skip


def _launch_backward(
    grad_TD: Tensor, tokens_T: Tensor, d_VD: Tensor, first: int, add: bool
) -> None:
    ordered, places = torch.sort(tokens_T.int(), stable=True)  # in half as many passes as int64
    rows, columns = grad_TD.shape
    how = tuned("embedding", f"backward,{short(grad_TD.dtype)}", DEFAULT_BACKWARD)
    chunk, block = how["chunk"], min(how["block"], width(columns))
    chunks = blocks(rows, chunk)
    parts = torch.empty(2 * chunks, columns, dtype=torch.float32, device=grad_TD.device)
    launch(
        _scatter_kernel, rows * blocks(columns, block),
        grad_TD, ordered, places, d_VD, parts, rows, first, d_VD.shape[0], grad_TD.stride(0),
        d_VD.stride(0), COLUMNS=columns, BLOCK=block, CHUNK=chunk, ADD=add, num_warps=how["warps"],
    )  # fmt: skip
    if chunks > 1:
        block = min(256, width(columns))
        launch(
            _join_kernel, (chunks - 1) * blocks(columns, block),
            ordered, d_VD, parts, rows, first, d_VD.shape[0], d_VD.stride(0),
            COLUMNS=columns, BLOCK=block, CHUNK=chunk, ADD=add, TOGETHER=_TOGETHER,
        )  # fmt: skip


def cost(tokens: int, columns: int, element_bytes: int = 2) -> Cost:
    return Cost(0, 2 * tokens * columns * element_bytes)


def cost_backward(
    tokens: int, distinct: int, vocab: int, columns: int, element_bytes: int = 2
) -> Cost:
    """Each gradient in, each row of the table out: zero, or a sum."""
    written = max(vocab, distinct)
    return Cost(tokens * columns, (tokens + written) * columns * element_bytes)
