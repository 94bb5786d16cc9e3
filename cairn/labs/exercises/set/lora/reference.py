"""y = x (W + alpha / r B A)^T, with W frozen."""

import torch
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, weight_OI: torch.Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        # begin answer
        outs, ins = weight_OI.shape
        self.weight_OI = nn.Parameter(weight_OI.clone(), requires_grad=False)
        self.a_RI = nn.Parameter(torch.randn(rank, ins) / ins**0.5)
        self.b_OR = nn.Parameter(torch.zeros(outs, rank))
        self.scale = alpha / rank
        # end answer

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        # begin answer
        return x_TI @ self.weight_OI.T + (x_TI @ self.a_RI.T) @ self.b_OR.T * self.scale
        # end answer

    def merged(self) -> torch.Tensor:
        """One weight that does the same."""
        # begin answer
        return self.weight_OI + self.scale * self.b_OR @ self.a_RI
        # end answer
