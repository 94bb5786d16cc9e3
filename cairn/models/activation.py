"""The activation of a feed-forward layer, with or without a gate.

gated      act(gate) * up, where the two lie side by side      [T, 2F] -> [T, F]
clamped    min(gate, c) * sigmoid(1.702 min(gate, c)) * (clamp(up, -c, c) + 1), as gpt-oss has it
ungated    act(up)                                             [T, F] -> [T, F]
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor

from cairn.models.spec import CLAMPED_ALPHA, Activation

if TYPE_CHECKING:
    from cairn.kernels.quantize.quantize import Quantized

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * (x * CLAMPED_ALPHA).sigmoid(),  # CLIP's
    "relu": F.relu,
    "clamped_silu": lambda x: x * (x * CLAMPED_ALPHA).sigmoid(),
}


class Gate(NamedTuple):
    """Activation function of an MLP, gated or not."""

    activation: Activation
    gated: bool
    limit: float = 0.0  # of clamped_silu

    @property
    def is_swiglu(self) -> bool:
        return self.gated and self.activation == "silu"

    @property
    def is_linear_in_up(self) -> bool:
        """Does its result scale as the half that is no gate does? A clamp and the 1 that is added do not."""
        return self.gated and self.activation != "clamped_silu"

    @property
    def has_kernel(self) -> bool:
        return self.gated and self.activation not in ("quick_gelu", "relu", "clamped_silu")

    def of(self, parts: list[Tensor]) -> Tensor:
        """Compute with torch, with gradients, from the separate projections."""
        if self.activation == "clamped_silu":
            gate_TF, up_TF = parts[0].clamp(max=self.limit), parts[1].clamp(-self.limit, self.limit)
            return ACTIVATIONS[self.activation](gate_TF) * (up_TF + 1)
        first_TF = ACTIVATIONS[self.activation](parts[0])
        return first_TF * parts[1] if self.gated else first_TF

    def plain(self, inner_TF: Tensor) -> Tensor:
        """The same from the joined projection."""
        return self.of(list(inner_TF.chunk(2, dim=-1)) if self.gated else [inner_TF])

    def fast(self, inner_TF: Tensor) -> Tensor:
        """Compute with the fused kernel if there is one."""
        if self.has_kernel:
            from cairn.kernels.layer.activation import gated_activation

            return gated_activation(inner_TF, None, cast(Any, self.activation))
        return self.plain(inner_TF)

    def fast_fp8(self, inner_TF: Tensor) -> "Quantized":
        """Compute with the fused kernel (`has_kernel`); the result is quantised to float8 rows."""
        from cairn.kernels.layer.activation import gated_activation_fp8

        return gated_activation_fp8(inner_TF, None, cast(Any, self.activation))

    def in_place(self, inner_TF: Tensor) -> Tensor:
        """Compute with the fewest operations, without gradients; may overwrite its input."""
        if self.activation == "clamped_silu":
            return self.plain(inner_TF)
        act = ACTIVATIONS[self.activation]
        if not self.gated:
            return act(inner_TF)
        gate_TF, up_TF = inner_TF.chunk(2, dim=-1)
        return act(gate_TF).mul_(up_TF)
