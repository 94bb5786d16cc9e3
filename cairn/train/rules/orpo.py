"""ORPO (arXiv:2403.07691): cross entropy of the chosen completion, and the odds of it against the rejected one.

-mean x_c - weight * log sigmoid(log odds_c - log odds_r)        odds = p / (1 - p), p = exp(mean x)
"""

import torch.nn.functional as F
from torch import Tensor

from cairn.train.rules.pairs import Completions, PairLoss

LARGEST = -1e-6  # of a mean log-probability: at 0 the odds are infinite


class ORPO:
    needs_reference = False
    per_token = True

    def __init__(self, weight: float = 0.1) -> None:
        self.weight = weight

    def __call__(self, chosen: Completions, rejected: Completions) -> PairLoss:
        c_P, r_P = chosen.mean_P.clamp(max=LARGEST), rejected.mean_P.clamp(max=LARGEST)
        ratio_P = (c_P - log1mexp(c_P)) - (r_P - log1mexp(r_P))
        loss_P = -chosen.mean_P - self.weight * F.logsigmoid(ratio_P)
        slope_P = -self.weight * (-ratio_P).sigmoid()
        # d (x - log(1 - e^x)) / dx = 1 / (1 - e^x)
        of_chosen_P = -1 + slope_P / -c_P.expm1()
        of_rejected_P = -slope_P / -r_P.expm1()
        return PairLoss(loss_P, of_chosen_P / chosen.tokens_P, of_rejected_P / rejected.tokens_P)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) of x < 0, without cancellation."""
    return (-x.expm1()).log()
