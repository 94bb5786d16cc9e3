"""Direct preference optimisation (arXiv:2305.18290): -log sigmoid(beta * (gain of chosen - gain of rejected))."""

import torch.nn.functional as F

from cairn.train.rules.pairs import Completions, PairLoss


class DPO:
    needs_reference = True
    per_token = False

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        """`label_smoothing`: the share of pairs whose label is taken to be wrong (conservative DPO)."""
        self.beta, self.smoothing = beta, label_smoothing

    def __call__(self, chosen: Completions, rejected: Completions) -> PairLoss:
        margin_P = self.beta * (chosen.gain_P - rejected.gain_P)
        smooth = self.smoothing
        loss_P = -(1 - smooth) * F.logsigmoid(margin_P) - smooth * F.logsigmoid(-margin_P)
        slope_P = self.beta * (smooth * margin_P.sigmoid() - (1 - smooth) * (-margin_P).sigmoid())
        return PairLoss(loss_P, slope_P, -slope_P)
