"""SmoothQuant (arXiv:2211.10438): outliers of activations move into the weights, where they are easier to round.

s = max|x|^a / max|w|^(1-a)        for each input column, folded into the norm or rows before

Where activations have no outliers, weights would only become harder to round: such columns keep s = 1.
"""

import torch
from torch import Tensor

from cairn.compress.scaling import Fold, storable_scale
from cairn.models.quantized.rounding import Grid, fake_quantized, rounded_activations

STRENGTH = 0.5


def smoothing_scale(fold: Fold, strength: float = STRENGTH) -> Tensor:
    """What each input column is divided by."""
    max_w_K = torch.stack([w_NK.abs().amax(0) for w_NK in fold.weights()]).amax(0).clamp(min=1e-5)
    max_x_K = fold.inputs.max_abs_K.clamp(min=1e-5)
    return (max_x_K**strength / max_w_K ** (1 - strength)).clamp(min=1e-5)


def helpful_scale(fold: Fold, strength: float, grid: Grid, stored: torch.dtype) -> Tensor:
    """The smoothing scale, or 1 where it does not lower the error of what the matrices give out."""
    scale_K = storable_scale(fold, smoothing_scale(fold, strength), stored)
    unscaled_K = torch.ones_like(scale_K)
    error, unscaled = (_error(fold, one_K, grid, stored) for one_K in (scale_K, unscaled_K))
    return scale_K if error < unscaled else unscaled_K


def _error(fold: Fold, scale_K: Tensor, grid: Grid, stored: torch.dtype) -> float:
    """Squared, with weights and activations rounded, on rows of the calibration text."""
    x_MK = fold.inputs.sample_MK.float()
    rounded_MK = rounded_activations(x_MK / scale_K, grid)
    made = [fake_quantized(w_NK * scale_K, grid, stored) for w_NK in fold.weights()]
    wanted = [x_MK @ w_NK.t() for w_NK in fold.weights()]
    errors = [rounded_MK @ w_NK.t() - y_MN for w_NK, y_MN in zip(made, wanted, strict=True)]
    return sum(float(error_MN.square().sum()) for error_MN in errors)
