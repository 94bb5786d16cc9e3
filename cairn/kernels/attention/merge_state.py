"""Two attention results over different keys become the result over all of them.

    lse = log(exp(lse_a) + exp(lse_b));  out = exp(lse_a - lse) * a + exp(lse_b - lse) * b

This is what joins a prefix that many sequences share with what each has for itself (cascade), and the blocks of keys
that travel around a ring (context parallel). It is associative: any number of results can be joined, in any
order. Log-sum-exps are natural, float32; a side that saw no key has -inf there, and its numbers are not looked at
(they may be NaN). Knows nothing about where the keys were. Bytes moved: three times the result.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, apart, check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.tuned import tuned


class State(NamedTuple):
    """Attention over some keys, in a form that can be joined with attention over others."""

    out_THC: Tensor
    lse_TH: Tensor


def merge_state_reference(a: State, b: State) -> State:
    lse_TH = torch.logaddexp(a.lse_TH, b.lse_TH)  # of two -inf: -inf
    joined = torch.zeros(a.out_THC.shape, dtype=lse_TH.dtype, device=lse_TH.device)
    for side in (a, b):
        saw_TH = side.lse_TH > -torch.inf
        weight_TH = torch.where(saw_TH, (side.lse_TH - lse_TH).exp(), 0.0)
        joined += torch.where(saw_TH[..., None], side.out_THC * weight_TH[..., None], 0.0)
    return State(joined.to(a.out_THC.dtype), lse_TH)


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(
    a, a_lse, b, b_lse, out, lse, rows, a_token, a_head, b_token, b_head, out_token, out_head,
    a_lse_token, a_lse_head, b_lse_token, b_lse_head, lse_token, lse_head,
    HEADS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    there = row < rows
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    level_a = tl.load(
        a_lse + token * a_lse_token + head * a_lse_head, mask=there, other=float("-inf")
    )
    level_b = tl.load(
        b_lse + token * b_lse_token + head * b_lse_head, mask=there, other=float("-inf")
    )
    top = tl.maximum(level_a, level_b)
    top = tl.where(top == float("-inf"), 0.0, top)  # neither saw a key: no difference of infinities
    weight_a = tl.exp(level_a - top)
    weight_b = tl.exp(level_b - top)
    total = weight_a + weight_b
    saw = total > 0.0
    share = tl.where(saw, 1.0 / tl.where(saw, total, 1.0), 0.0)
    # A side without weight is not even read.
    mask = there[:, None] & (column < C)
    mask_a = mask & (weight_a > 0.0)[:, None]
    mask_b = mask & (weight_b > 0.0)[:, None]
    x = tl.load(a + (token * a_token + head * a_head)[:, None] + column, mask=mask_a, other=0.0)
    y = tl.load(b + (token * b_token + head * b_head)[:, None] + column, mask=mask_b, other=0.0)
    joined = (
        x.to(tl.float32) * (weight_a * share)[:, None]
        + y.to(tl.float32) * (weight_b * share)[:, None]
    )
    at = out + (token * out_token + head * out_head)[:, None] + column
    tl.store(at, joined.to(out.dtype.element_ty), mask=mask)
    level = tl.where(saw, top + tl.log(tl.where(saw, total, 1.0)), float("-inf"))
    tl.store(lse + token * lse_token + head * lse_head, level, mask=there)


def merge_state(a: State, b: State, out: State | None = None, impl: Impl = "auto") -> State:
    """`out` may be `a` or `b` itself. Results float32, bfloat16 or float16, each side its own; out as a."""
    check("a.out", a.out_THC, dtypes=FLOATS, shape=(None, None, None))
    shape = a.out_THC.shape
    check("a.lse", a.lse_TH, dtypes=(torch.float32,), shape=shape[:2], beside=a.out_THC)
    check("b.out", b.out_THC, dtypes=FLOATS, shape=shape, beside=a.out_THC)
    check("b.lse", b.lse_TH, dtypes=(torch.float32,), shape=shape[:2], beside=a.out_THC)
    joined = State(torch.empty_like(a.out_THC), torch.empty_like(a.lse_TH)) if out is None else out
    check("out.out", joined.out_THC, dtypes=(a.out_THC.dtype,), shape=shape, beside=a.out_THC)
    check("out.lse", joined.lse_TH, dtypes=(torch.float32,), shape=shape[:2], beside=a.out_THC)
    for name, side in (("a.out", a), ("b.out", b), ("out.out", joined)):
        strides = side.out_THC.stride()
        require(strides[2] == 1, name, "stride 1 in the last dimension", strides)
    apart("out.out", joined.out_THC)
    apart("out.lse", joined.lse_TH)
    offers = {"triton": needs_cuda(a.out_THC), "reference": None}
    if choose("merge_state", impl, offers).impl == "reference":
        for room, result in zip(joined, merge_state_reference(a, b), strict=True):
            room.copy_(result)
    elif a.lse_TH.numel():
        _launch(a, b, joined)
    return joined


def _launch(a: State, b: State, joined: State) -> None:
    tokens, heads, columns = a.out_THC.shape
    how = tuned("merge_state", _key(columns, a.out_THC.dtype), {"rows": 32, "warps": 4})
    outs, lses = zip(a, b, joined, strict=True)
    strides = [s for tensor in (*outs, *lses) for s in tensor.stride()[:2]]
    kernel: Any = _merge_kernel
    kernel[(triton.cdiv(tokens * heads, how["rows"]),)](
        *a, *b, *joined, tokens * heads, *strides, HEADS=heads, C=columns,
        WIDTH=triton.next_power_of_2(columns), ROWS=how["rows"], num_warps=how["warps"],
    )  # fmt: skip


def _key(columns: int, dtype: torch.dtype) -> str:
    return f"columns={columns},{str(dtype).removeprefix('torch.')}"


def cost(tokens: int, heads: int, columns: int, bytes_each: int = 2) -> Cost:
    rows = tokens * heads
    return Cost(flops=3.0 * rows * columns, bytes=3.0 * rows * (columns * bytes_each + 4))
