"""One Triton kernel: read numbers that lie `stride` apart and write them side by side. Imported on a GPU only."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _gather(x, y, count, stride, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(y + at, tl.load(x + at * stride, mask=inside), mask=inside)


# Its arguments are Triton's business: a number where the kernel says constexpr.
_KERNEL: Any = _gather


def gather(x: Tensor, y: Tensor, stride: int) -> None:
    """y[i] = x[i * stride]."""
    _KERNEL[(triton.cdiv(y.numel(), BLOCK),)](x, y, y.numel(), stride, BLOCK=BLOCK)


def compiled_gather(x: Tensor, y: Tensor, stride: int, warps: int) -> object:
    """The kernel as it is loaded, with blocks of so many warps."""
    grid = (triton.cdiv(y.numel(), BLOCK),)
    return _KERNEL[grid](x, y, y.numel(), stride, BLOCK=BLOCK, num_warps=warps)
