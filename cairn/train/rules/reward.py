"""Reward model (Bradley and Terry): -log sigmoid(r_c - r_r - margin) + center (r_c + r_r)^2, of scores, not tokens."""

import torch.nn.functional as F
from torch import Tensor

from cairn.train.rules.pairs import PairLoss


def reward_loss(
    chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | float = 0.0, center: float = 0.0
) -> PairLoss:
    """Losses of pairs, and slopes with respect to the two scores. `center`: keeps scores around 0."""
    difference_P, total_P = chosen_P - rejected_P - margin_P, chosen_P + rejected_P
    loss_P = -F.logsigmoid(difference_P) + center * total_P.square()
    slope_P, pull_P = -(-difference_P).sigmoid(), 2 * center * total_P
    return PairLoss(loss_P, slope_P + pull_P, -slope_P + pull_P)
