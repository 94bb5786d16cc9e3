"""Estimators of the divergence from a reference at the sampled tokens, d = reference - logp (arXiv:2506.09477).

k1 = -d             unbiased and noisy; as a loss its expected gradient is 0: for rewards only
k2 = d^2 / 2        biased value, the right gradient
k3 = e^d - d - 1    unbiased and never negative; biased gradient
"""

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
LARGEST = 20.0  # of a log ratio


def divergence(logp_T: Tensor, reference_T: Tensor, kind: Estimator) -> tuple[Tensor, Tensor]:
    """Value and slope of each token."""
    d_T = (reference_T - logp_T).clamp(-LARGEST, LARGEST)
    if kind == "k1":
        return -d_T, torch.ones_like(d_T)
    if kind == "k2":
        return d_T.square() / 2, -d_T
    return d_T.exp() - d_T - 1, 1 - d_T.exp()
