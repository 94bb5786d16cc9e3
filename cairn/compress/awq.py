"""AWQ (arXiv:2306.00978): columns with large inputs are scaled up before rounding, so that they lose less.

    s = mean|x|^r / mean|w|^(1-r), made to have sqrt(max * min) = 1        r on a grid, by the least error of the output

r = 0 with s = 1 is among the candidates, so that no output is worse than round to nearest on the rows it is judged by.
"""

import torch
from torch import Tensor

from cairn.compress.scaling import Fold, storable_scale
from cairn.compress.statistics import bounded_rows
from cairn.models.quantized.rounding import QuantizationGrid, fake_quantized

CANDIDATES = 20


def best_scale(fold: Fold, grid: QuantizationGrid, stored: torch.dtype) -> Tensor:
    """The scale of each input column that leaves the least error in what the matrices give out."""
    x_MK = bounded_rows(fold.inputs.sample_MK.float())
    weights = fold.weights()
    wanted = [x_MK @ w_NK.t() for w_NK in weights]
    best_K = torch.ones_like(fold.inputs.mean_abs_K)
    least = _error(x_MK, weights, wanted, best_K, grid, stored)
    for candidate in range(1, CANDIDATES):
        scale_K = candidate_scale(fold.inputs.mean_abs_K, weights, candidate / CANDIDATES)
        scale_K = storable_scale(fold, scale_K, stored)
        error = _error(x_MK, weights, wanted, scale_K, grid, stored)
        if error < least:
            least, best_K = error, scale_K
    return best_K


def candidate_scale(mean_x_K: Tensor, weights: list[Tensor], ratio: float) -> Tensor:
    mean_w_K = torch.stack([w_NK.abs().mean(0) for w_NK in weights]).mean(0)
    scale_K = mean_x_K.clamp(min=1e-8) ** ratio / (mean_w_K ** (1 - ratio) + 1e-4)
    scale_K = scale_K.clamp(min=1e-4)
    return scale_K / (scale_K.max() * scale_K.min()).sqrt()


def _error(
    x_MK: Tensor,
    weights: list[Tensor],
    wanted: list[Tensor],
    scale_K: Tensor,
    grid: QuantizationGrid,
    stored: torch.dtype,
) -> float:
    total = 0.0
    for w_NK, y_MN in zip(weights, wanted, strict=True):
        made_NK = fake_quantized(w_NK * scale_K, grid, stored) / scale_K
        total += float((x_MK @ made_NK.t() - y_MN).square().sum())
    return total
