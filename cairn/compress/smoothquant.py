"""SmoothQuant (arXiv:2211.10438): outliers of activations move into the weights, where they are easier to round.

s = max|x|^a / max|w|^(1-a)        for each input column, folded into the norm or rows before
"""

import torch
from torch import Tensor

from cairn.compress.scaling import Fold

STRENGTH = 0.5


def smoothing_scale(fold: Fold, strength: float = STRENGTH) -> Tensor:
    """What each input column is divided by."""
    max_w_K = torch.stack([w_NK.abs().amax(0) for w_NK in fold.weights()]).amax(0).clamp(min=1e-5)
    max_x_K = fold.inputs.max_abs_K.clamp(min=1e-5)
    return (max_x_K**strength / max_w_K ** (1 - strength)).clamp(min=1e-5)
