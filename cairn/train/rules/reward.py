"""Reward model (Bradley and Terry): -log sigmoid(r_c - r_r - margin) + center (r_c + r_r)^2, of scores, not tokens.

The score that recipes train (`objective.kind = "reward"`) is the log-probability of one more end token behind an
answer: no other parameters than the model's, and any server that reports log-probabilities of a prompt has it.
"""

import torch.nn.functional as F
from torch import Tensor

from cairn.train.rules.pairs import Completions, PairLoss


class Reward:
    """A `PairRule` over samples whose only target is the end token behind each answer."""

    needs_reference = False
    per_token = False

    def __init__(self, center: float = 0.0) -> None:
        self.center = center

    def __call__(self, chosen: Completions, rejected: Completions) -> PairLoss:
        return reward_loss(chosen.logp_P, rejected.logp_P, center=self.center)


def reward_loss(
    chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | float = 0.0, center: float = 0.0
) -> PairLoss:
    """Losses of pairs, and slopes with respect to the two scores. `center`: keeps scores around 0."""
    difference_P, total_P = chosen_P - rejected_P - margin_P, chosen_P + rejected_P
    loss_P = -F.logsigmoid(difference_P) + center * total_P.square()
    slope_P, pull_P = -(-difference_P).sigmoid(), 2 * center * total_P
    return PairLoss(loss_P, slope_P + pull_P, -slope_P + pull_P)
