"""SimPO (arXiv:2405.14734): means over tokens, a margin, and no reference."""

import torch.nn.functional as F

from cairn.train.rules.pairs import Completions, PairLoss


class SimPO:
    needs_reference = False
    per_token = True

    def __init__(self, beta: float = 2.0, gamma: float = 1.0) -> None:
        """`gamma`: by how much the chosen completion has to win, before `beta`'s scale is taken off it."""
        self.beta, self.gamma = beta, gamma

    def __call__(self, chosen: Completions, rejected: Completions) -> PairLoss:
        margin_P = self.beta * (chosen.mean_P - rejected.mean_P) - self.gamma
        slope_P = -self.beta * (-margin_P).sigmoid()
        return PairLoss(
            -F.logsigmoid(margin_P), slope_P / chosen.tokens_P, -slope_P / rejected.tokens_P
        )
