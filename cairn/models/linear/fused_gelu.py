"""A product and its GELU in one operation of oneDNN, on a CPU.

torch computes an exact GELU in a pass of its own, which on a CPU takes as long as the product before it. oneDNN applies
it to each block of the result while that lies in a cache; the numbers are the same. The plain form stays beside it.
"""

import torch
from torch import Tensor

ROWS = 1024  # of a typical batch: what the packed layout is made for


class FusedGelu:
    """gelu(x @ weight.T + bias)."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.detach(), ROWS)
        self.bias_N = bias_N

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias_N, "gelu", [], "none")


def has_fused_gelu(weight: Tensor) -> bool:
    """Return whether matmuls with such a weight can be fused with GELU."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
