"""Softmax over rows: one program for each."""

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x, y, columns, WIDTH: tl.constexpr):
    # begin answer: pass
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    v = tl.load(x + row * columns + column, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(
        y + row * columns + column, (e / tl.sum(e, axis=0)).to(y.dtype.element_ty), mask=inside
    )
    # end answer


def softmax(x_TD: torch.Tensor) -> torch.Tensor:
    """Of a contiguous matrix, row by row."""
    rows, columns = x_TD.shape
    y_TD = torch.zeros_like(x_TD)
    _softmax[(rows,)](x_TD, y_TD, columns, WIDTH=triton.next_power_of_2(columns))
    return y_TD
