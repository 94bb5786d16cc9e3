"""SmoothQuant (arXiv:2211.10438): outliers of activations move into the weights, where they are easier to round.

s = max|x|^a / max|w|^(1-a)        for each input column, folded into the norm or rows before

The strength a is the one of `STRENGTHS` that leaves the least error in what the matrices give out. Where none leaves
less than no smoothing, because activations have no outliers, columns keep s = 1.
"""

import torch
from torch import Tensor

from cairn.compress.scaling import Fold, storable_scale
from cairn.compress.statistics import bounded_rows
from cairn.models.quantized.rounding import QuantizationGrid, fake_quantized, rounded_activations

STRENGTHS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def smoothing_scale(fold: Fold, strength: float) -> Tensor:
    """Divisor of each input column."""
    max_w_K = torch.stack([w_NK.abs().amax(0) for w_NK in fold.weights()]).amax(0).clamp(min=1e-5)
    max_x_K = fold.inputs.max_abs_K.clamp(min=1e-5)
    return (max_x_K**strength / max_w_K ** (1 - strength)).clamp(min=1e-5)


def helpful_scale(
    fold: Fold, strengths: tuple[float, ...], grid: QuantizationGrid, stored: torch.dtype
) -> Tensor:
    """The smoothing scale with the least error of what the matrices give out; 1 is among the candidates."""
    scales = [
        storable_scale(fold, smoothing_scale(fold, strength), stored) for strength in strengths
    ]
    candidates = [torch.ones_like(fold.inputs.max_abs_K), *scales]
    errors = _errors(fold, candidates, grid, stored)
    return candidates[errors.index(min(errors))]


def _errors(
    fold: Fold, scales: list[Tensor], grid: QuantizationGrid, stored: torch.dtype
) -> list[float]:
    """Squared, with weights and activations rounded, on rows of the calibration text.

    Each token's activations have a scale of their own, so that an error grows with its row: rows are bounded, or a few
    giant first tokens would choose the strength for all others.
    """
    x_MK, weights = bounded_rows(fold.inputs.sample_MK.float()), fold.weights()
    wanted = [x_MK @ w_NK.t() for w_NK in weights]
    errors = []
    for scale_K in scales:
        rounded_MK = rounded_activations(x_MK / scale_K, grid)
        made = [fake_quantized(w_NK * scale_K, grid, stored) for w_NK in weights]
        lost = [rounded_MK @ w_NK.t() - y_MN for w_NK, y_MN in zip(made, wanted, strict=True)]
        errors.append(sum(float(error_MN.square().sum()) for error_MN in lost))
    return errors
