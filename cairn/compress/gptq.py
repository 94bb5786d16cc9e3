"""GPTQ (arXiv:2210.17323): columns are rounded one after another, and those to come make up for each error.

    H = 2/n sum x x^T        U = upper Cholesky factor of H^-1
    e = (w_i - rounded w_i) / U_ii        w_j -= e U_ij for all columns j > i

What remains in the output is the sum of all e^2. A scale is therefore the one with the least sum of
(w_i - rounded w_i)^2 / U_ii^2 over the columns that share it (`scale_search`), before errors are made up for.

Weights are held transposed here, one column in one piece of memory. Inside a block of 128 columns errors are spread at
once, to the columns behind it in one product per block. A Hessian that has no Cholesky factor gets more damping; one
that has none even then is refused by name, never rounded to nearest in silence.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cairn.compress.scale_search import best_steps
from cairn.core.errors import DataError
from cairn.models.quantized.planes import Planes, dequantized
from cairn.models.quantized.rounding import (
    QuantizationGrid,
    Steps,
    nearest_levels,
    planes_of,
    spread_steps,
    steps_of,
)

BLOCK = 128
DAMPING = (0.01, 0.1, 1.0)  # of the mean of the diagonal, tried in this order
FEW_ROWS = 4  # damping is this share of columns to rows, between the first two of the above

# Block [B, N], its part of U, scales, shifts, grid -> levels, errors; see `round_columns`.
RoundColumns = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, QuantizationGrid], tuple[Tensor, Tensor]
]


def gptq(
    w_NK: Tensor,
    hessian_KK: Tensor,
    grid: QuantizationGrid,
    stored: torch.dtype,
    name: str = "a matrix",
    ordered: bool = True,
    columns: RoundColumns | None = None,
    damping: float = DAMPING[0],
) -> Planes:
    """`ordered`: columns with the largest inputs first, at the scales that suit their groups at the beginning.

    Otherwise columns go from left to right, and each group gets its scale when it is reached. `columns`: another form
    of `round_columns`. `damping`: of the Hessian, see `damping_for`.
    """
    columns = columns or round_columns
    w_NK = w_NK.float().clone()
    alive_K = hessian_KK.diagonal() > 0
    w_NK *= alive_K
    ordered = ordered or grid.block_rows > 1  # a scale that rows share is set before any of them
    if not ordered:
        upper_KK = inverse_factor(hessian_KK, name, damping)
        levels_KN, steps = _group_by_group(w_NK, upper_KK, grid, stored, columns)
        return planes_of(levels_KN.t().contiguous(), steps, grid)
    order_K = hessian_KK.diagonal().argsort(descending=True)
    upper_KK = inverse_factor(hessian_KK[order_K][:, order_K], name, damping)
    importance_K = torch.empty_like(upper_KK[0])
    importance_K[order_K] = importance(upper_KK)
    steps = best_steps(w_NK, importance_K, grid, stored)
    levels_KN = _at_given_scales(w_NK[:, order_K], upper_KK, steps, order_K, grid, columns)
    levels_NK = torch.empty_like(levels_KN.t().contiguous())
    levels_NK[:, order_K] = levels_KN.t()
    return planes_of(levels_NK, steps, grid)


def importance(upper_KK: Tensor) -> Tensor:
    """Cost of an error in each column that later columns cannot compensate."""
    return upper_KK.diagonal().square().reciprocal()


def damping_for(rows: int, columns: int) -> float:
    """Damping of a Hessian by its number of rows; GPTQ's usual 0.01 assumes hundreds of rows per column.

    With few rows some directions look as if no input had them. Errors are moved there, which costs on other text.
    """
    return min(max(DAMPING[0], FEW_ROWS * columns / max(rows, 1)), DAMPING[1])


def inverse_factor(hessian_KK: Tensor, name: str, damping: float = DAMPING[0]) -> Tensor:
    """The upper Cholesky factor of the inverse of a Hessian, with more damping where it has none."""
    hessian_KK = hessian_KK.float().clone()
    diagonal_K = hessian_KK.diagonal()
    if not bool(torch.isfinite(diagonal_K).all()):
        raise DataError(
            f"the inputs of {name} are not finite on the calibration text",
            hint="compute in float32 or bfloat16 (--dtype), or look for NaN in the weights",
        )
    diagonal_K[diagonal_K == 0] = 1.0
    mean = float(diagonal_K.mean())
    added = 0.0
    for share in (damping, *(more for more in DAMPING if more > damping)):
        diagonal_K += (share - added) * mean
        added = share
        lower_KK, failed = torch.linalg.cholesky_ex(hessian_KK)
        if int(failed):
            continue
        inverse_KK = torch.cholesky_inverse(lower_KK)
        upper_KK, failed = torch.linalg.cholesky_ex(inverse_KK, upper=True)
        if not int(failed) and bool(torch.isfinite(upper_KK).all()):
            return upper_KK
    raise DataError(
        f"the Hessian of {name} has no Cholesky factor, even with damping {DAMPING[-1]:g}",
        hint="use more calibration text (--samples, --data), or --method rtn or awq",
    )


def _at_given_scales(
    w_NK: Tensor,
    upper_KK: Tensor,
    steps: Steps,
    order_K: Tensor,
    grid: QuantizationGrid,
    columns: RoundColumns,
) -> Tensor:
    """Levels [K, N] of columns that stand in `order_K`."""
    rows, width = w_NK.shape
    scale_KN = spread_steps(steps.scales, grid, rows, width).t()
    shift_KN = None
    if steps.shifts is not None:
        shift_KN = spread_steps(steps.shifts, grid, rows, width).t()
    by_row = len(scale_KN) == 1
    w_KN = w_NK.t().contiguous()
    levels: list[Tensor] = []
    for begin in range(0, width, BLOCK):
        part = order_K[begin : begin + BLOCK]
        places = torch.zeros_like(part) if by_row else part
        scale_BN = scale_KN[places]
        shift_BN = None if shift_KN is None else shift_KN[places]
        levels.append(_round_block(w_KN, upper_KK, begin, scale_BN, shift_BN, grid, columns))
    return torch.cat(levels)


def _group_by_group(
    w_NK: Tensor,
    upper_KK: Tensor,
    grid: QuantizationGrid,
    stored: torch.dtype,
    columns: RoundColumns,
) -> tuple[Tensor, Steps]:
    """Levels [K, N] from left to right; a group's scale suits its weights when they are reached."""
    rows, width = w_NK.shape
    group = grid.group or width
    w_KN = w_NK.t().contiguous()
    importance_K = importance(upper_KK)
    global_scale = steps_of(w_NK, grid, stored).global_scale
    levels: list[Tensor] = []
    found: list[Steps] = []
    for begin in range(0, width, group):
        inside = slice(begin, begin + group)
        now_NG = w_KN[inside].t().contiguous()
        one = best_steps(now_NG, importance_K[inside], grid, stored, global_scale)
        found.append(one)
        for first in range(begin, begin + group, BLOCK):
            count = min(BLOCK, begin + group - first)
            scale_BN = one.scales.t().expand(count, rows)
            shift_BN = None if one.shifts is None else one.shifts.t().expand(count, rows)
            levels.append(_round_block(w_KN, upper_KK, first, scale_BN, shift_BN, grid, columns))
    shifts = [one.shifts for one in found if one.shifts is not None]
    scales = torch.cat([one.scales for one in found], 1)
    return torch.cat(levels), Steps(scales, torch.cat(shifts, 1) if shifts else None, global_scale)


def _round_block(
    w_KN: Tensor,
    upper_KK: Tensor,
    begin: int,
    scale_BN: Tensor,
    shift_BN: Tensor | None,
    grid: QuantizationGrid,
    columns: RoundColumns,
) -> Tensor:
    """Round some columns in place, spread their errors over those behind, and give back their levels."""
    end = begin + len(scale_BN)
    upper_BB = upper_KK[begin:end, begin:end]
    levels_BN, errors_BN = columns(w_KN[begin:end], upper_BB, scale_BN, shift_BN, grid)
    w_KN[end:].addmm_(upper_KK[begin:end, end:].t(), errors_BN, alpha=-1.0)
    return levels_BN


def round_columns(
    block_BN: Tensor,
    upper_BB: Tensor,
    scale_BN: Tensor,
    shift_BN: Tensor | None,
    grid: QuantizationGrid,
) -> tuple[Tensor, Tensor]:
    """Levels and errors of the columns of a block, each after those before it; the block is overwritten."""
    errors_BN, levels = torch.empty_like(block_BN), []
    for i in range(len(block_BN)):
        shift_N = None if shift_BN is None else shift_BN[i]
        level_N = nearest_levels(block_BN[i], scale_BN[i], shift_N, grid)
        error_N = (block_BN[i] - _value(level_N, scale_BN[i], shift_N, grid)) / upper_BB[i, i]
        block_BN[i:].addr_(upper_BB[i, i:], error_N, alpha=-1.0)
        errors_BN[i] = error_N
        levels.append(level_N)
    return torch.stack(levels), errors_BN


def _value(
    level_N: Tensor, scale_N: Tensor, shift_N: Tensor | None, grid: QuantizationGrid
) -> Tensor:
    """Dequantised values of one column of levels."""
    if grid.kind == "int4":
        return scale_N * level_N + (-8.0 * scale_N if shift_N is None else shift_N)
    if grid.kind in ("int8", "fp8"):
        return scale_N * level_N.float()
    row = planes_of(level_N[:, None], Steps(scale_N[:, None]), grid)
    return dequantized(row)[:, 0]


class GraphedColumns:
    """`round_columns` as one CUDA graph per shape: launches of its small kernels take longer than their work."""

    def __init__(self) -> None:
        self._recorded: dict[tuple[object, ...], _Recorded] = {}

    def __call__(
        self,
        block_BN: Tensor,
        upper_BB: Tensor,
        scale_BN: Tensor,
        shift_BN: Tensor | None,
        grid: QuantizationGrid,
    ) -> tuple[Tensor, Tensor]:
        # e2m1 looks values up in a table that is made on the host, which no graph can hold.
        if not block_BN.is_cuda or grid.kind in ("mxfp4", "nvfp4"):
            return round_columns(block_BN, upper_BB, scale_BN, shift_BN, grid)
        key = (tuple(block_BN.shape), shift_BN is None, grid)
        if key not in self._recorded:
            self._recorded[key] = _Recorded(block_BN, upper_BB, scale_BN, shift_BN, grid)
        return self._recorded[key](block_BN, upper_BB, scale_BN, shift_BN)


class _Recorded:
    """The loop over one block at fixed addresses."""

    def __init__(
        self,
        block_BN: Tensor,
        upper_BB: Tensor,
        scale_BN: Tensor,
        shift_BN: Tensor | None,
        grid: QuantizationGrid,
    ) -> None:
        given = (block_BN, upper_BB, scale_BN, shift_BN)
        self.inputs = [None if one is None else one.clone() for one in given]
        block, upper, scale, shift = self.inputs
        assert block is not None
        assert upper is not None
        assert scale is not None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            round_columns(block, upper, scale, shift, grid)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.levels_BN, self.errors_BN = round_columns(block, upper, scale, shift, grid)

    def __call__(self, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        for held, one in zip(self.inputs, given, strict=True):
            if held is not None and one is not None:
                held.copy_(one)
        self.graph.replay()
        return self.levels_BN.clone(), self.errors_BN
