"""Relative error of results.

One number for everything: the length of the difference over the length of the truth (relative Frobenius error),
taken in float64. A NaN or an infinity that the truth does not have makes it infinite, so a poisoned output that
a kernel forgot to write cannot pass.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Tensors = Tensor | Sequence[Tensor]


def relative_error(result: Tensors, truth: Tensors) -> float:
    """Relative error; the maximum over several tensors."""
    if isinstance(result, Tensor) and isinstance(truth, Tensor):
        return _relative_error(result, truth)
    return max(
        (_relative_error(one, other) for one, other in zip(result, truth, strict=True)), default=0.0
    )


def _relative_error(result: Tensor, truth: Tensor) -> float:
    if result.shape != truth.shape:
        raise ValueError(f"found: wanted shape {list(truth.shape)}, got {list(result.shape)}")
    if truth.numel() == 0:
        return 0.0
    wide, exact = result.detach().double(), truth.detach().double()
    distance = float((wide - exact).norm())
    if not math.isfinite(distance):
        return math.inf
    length = float(exact.norm())
    return distance / length if length else distance


def poison(*tensors: Tensor) -> None:
    """Fill with what no kernel computes by accident."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(math.nan)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
