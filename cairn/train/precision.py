"""Numerical precision of weights and computation, and loss scaling for float16.

    float32    weights, gradients, states                                        16 bytes per parameter
    bfloat16   weights and gradients; float32 masters and states in the optimizer 16
    bfloat16   weights, gradients, states, all rounded at random                   8
    float16    as bfloat16 with masters; the loss is multiplied, or small gradients would become zero

The factor of float16 halves when gradients overflow and doubles after many steps in which they did not. It lives on the
device, like the decision: the host does not wait. fp8 is a matter of products, not of storage: see `products`.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cairn.train.config import Precision

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 1000  # good steps after which the factor doubles
MOST_HALVINGS = 24  # then the factor is 1
MOST = 2.0**MOST_HALVINGS


def dtype_of(precision: "Precision") -> torch.dtype:
    return DTYPES[precision.kind]


class LossScale:
    """Loss scale: multiplies the loss before backward and divides gradients afterwards. 1 unless float16."""

    def __init__(self, active: bool, device: torch.device | str) -> None:
        self.active = active
        first = FIRST_SCALE if active else 1.0
        self.scale = torch.tensor(first, device=device)
        self.streak = torch.zeros((), device=device)  # good steps since the factor changed

    def enlarge(self, valid: Tensor) -> Tensor:
        """The divisor of the loss, made smaller by the factor."""
        return valid / self.scale if self.active else valid

    def factor(self) -> Tensor | float:
        """Factor for a gradient that does not come from the loss."""
        return self.scale if self.active else 1.0

    def shrink(self, value: Tensor) -> Tensor:
        """A loss or a norm as it would be without the factor."""
        return value / self.scale if self.active else value

    def update(self, overflowed: Tensor) -> None:
        """Update the scale after a step. `overflowed`: gradients were not finite."""
        if not self.active:
            return
        self.streak = torch.where(overflowed, 0.0, self.streak + 1)
        grows = self.streak >= GROWTH_INTERVAL
        grown = torch.where(grows, (self.scale * 2).clamp(max=MOST), self.scale)
        self.scale = torch.where(overflowed, (self.scale / 2).clamp(min=1.0), grown)
        self.streak = torch.where(grows, 0.0, self.streak)

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "streak": self.streak}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.scale, self.streak = tensors["scale"], tensors["streak"]
