"""Search for the scale with the least error. The largest weight gives the scale's range, not the best rounding.

    scale = f * largest magnitude / largest level        f: the candidate with the least  sum_k importance_k * error_k^2

f = 1 is among the candidates, so that no row, group or block is worse than at the scale of its largest weight.
"""

import torch
from torch import Tensor

from cairn.models.quantized.planes import dequantized
from cairn.models.quantized.rounding import (
    QuantizationGrid,
    Steps,
    steps_of,
    sum_of_blocks,
    with_levels,
)

# The relative distances of e4m3's levels are the same in every octave: only where octaves begin is to be chosen, and
# nothing is clipped. With 4 bits clipping the largest weights can be worth its smaller steps. For int8 no other scale
# was better, and for mxfp4 none on average, so that both keep that of the largest weight.
FACTORS: dict[str, tuple[float, ...]] = {
    "fp8": tuple(2 ** (place / 16) for place in range(1, 16)),
    "int4": tuple(1 - place / 40 for place in range(-2, 21) if place),
    "nvfp4": tuple(1 - place / 40 for place in range(-6, 17) if place),
}


def best_steps(
    w_NK: Tensor,
    importance_K: Tensor,
    grid: QuantizationGrid,
    stored: torch.dtype,
    global_scale: float | None = None,
) -> Steps:
    """Scales with the least weighted error of round to nearest, each row, group or block for itself."""
    best = steps_of(w_NK, grid, stored, global_scale)
    least = _error(w_NK, importance_K, best, grid)
    for factor in FACTORS.get(grid.kind, ()):
        steps = steps_of(w_NK * factor, grid, stored, best.global_scale)
        error = _error(w_NK, importance_K, steps, grid)
        better = error < least
        shifts = best.shifts
        if shifts is not None and steps.shifts is not None:
            shifts = torch.where(better, steps.shifts, shifts)
        best = Steps(torch.where(better, steps.scales, best.scales), shifts, best.global_scale)
        least = torch.minimum(error, least)
    return best


def _error(w_NK: Tensor, importance_K: Tensor, steps: Steps, grid: QuantizationGrid) -> Tensor:
    """Weighted squared error of each scale."""
    error_NK = dequantized(with_levels(w_NK, steps, grid)) - w_NK
    return sum_of_blocks(error_NK.square() * importance_K, grid)
