"""KTO (arXiv:2402.01306): single completions that are good or bad, against how far the policy has moved at all.

    good   w_D (1 - sigmoid(beta (gain - z)))        bad   w_U (1 - sigmoid(beta (z - gain)))

z estimates the divergence from the reference: the mean gain of completions of other prompts, at least 0, without a
gradient. A batch of one completion has no other prompt, and z would be its own gain: `mismatched` pairs avoid that.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SequenceLoss(NamedTuple):
    loss_S: Tensor
    slope_S: Tensor  # d loss / d logp of each token of the sequence


class KTO:
    needs_reference = True
    per_token = False

    def __init__(self, beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0) -> None:
        self.beta, self.desirable, self.undesirable = beta, desirable, undesirable

    def __call__(self, gain_S: Tensor, good_S: Tensor, z: Tensor) -> SequenceLoss:
        """`gain_S`: summed log-probability less the reference's; `good_S`: bool; `z`: from `divergence`."""
        sign_S = torch.where(good_S, 1.0, -1.0)
        weight_S = torch.where(good_S, self.desirable, self.undesirable)
        kept_S = (self.beta * sign_S * (gain_S - z)).sigmoid()
        return SequenceLoss(
            weight_S * (1 - kept_S), -weight_S * self.beta * sign_S * kept_S * (1 - kept_S)
        )


def divergence(mismatched_gain_S: Tensor) -> Tensor:
    """z of a batch, from the gains of completions under other prompts."""
    return mismatched_gain_S.mean().clamp(min=0)
