"""A loss of each token as a function of its log-probability alone, with the slope that backward needs.

    rule(logp_T, part) -> loss_T, slope_T         slope = d loss / d logp, both without a graph

    gradient of the logits = slope * (onehot(target) - softmax)

So any such loss can be walked backward while the logits of a chunk are there, without a second product. `part` says
which of all tokens these are. Tokens whose target is ignored have neither loss nor slope, whatever a rule says.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TokenRule = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def with_slope(logp_T: Tensor, loss_T: Tensor, slope_T: Tensor) -> Tensor:
    """`loss_T`, whose gradient with respect to `logp_T` is `slope_T`."""
    return _WithSlope.apply(logp_T, loss_T, slope_T)


def applied(
    rule: TokenRule, logp_T: Tensor, counts_T: Tensor, part: slice
) -> tuple[Tensor, Tensor]:
    """Loss and slope, 0 where a token does not count."""
    with torch.no_grad():
        loss_T, slope_T = rule(logp_T.detach(), part)
    return loss_T.where(counts_T, 0.0), slope_T.where(counts_T, 0.0)


class _WithSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logp_T: Tensor, loss_T: Tensor, slope_T: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(slope_T)
        return loss_T.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (slope_T,) = ctx.saved_tensors
        return gradients[0] * slope_T, None, None
