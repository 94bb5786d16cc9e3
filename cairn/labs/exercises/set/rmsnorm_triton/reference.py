"""RMSNorm: one program for each row."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rmsnorm(x, weight, y, stride, columns, eps, WIDTH: tl.constexpr):
    # begin answer: pass
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    v = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(v * v, axis=0) / columns
    tl.store(
        y + row * columns + column,
        (v * tl.rsqrt(mean + eps) * w).to(y.dtype.element_ty),
        mask=inside,
    )
    # end answer


def rmsnorm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows may have a stride; the result is contiguous."""
    rows, columns = x_TD.shape
    y_TD = torch.zeros(rows, columns, dtype=x_TD.dtype, device=x_TD.device)
    width = triton.next_power_of_2(columns)
    _rmsnorm[(rows,)](x_TD, weight_D, y_TD, x_TD.stride(0), columns, eps, WIDTH=width)
    return y_TD
