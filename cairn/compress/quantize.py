"""A model with its matrices rounded, layer by layer, each on the output of the rounded layers before it.

rtn            nearest level                                      any scheme
gptq           later columns make up for earlier errors           any scheme
awq            columns with large inputs scaled up first          4-bit schemes
smoothquant    outliers of activations moved into the weights     w8a8

Matrices that cost most may stay in 16 bits: those that `keep` names, or as many as `most_added` takes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import torch
from torch import Tensor

from cairn.compress.awq import best_scale
from cairn.compress.gptq import GraphedColumns, RoundColumns, damping_for, gptq
from cairn.compress.layer_by_layer import LayerSites, MatrixSite, walk
from cairn.compress.scaling import apply_scales, folds_of
from cairn.compress.sensitivity import MatrixCost, matrix_costs, with_kept
from cairn.compress.smoothquant import STRENGTHS, helpful_scale
from cairn.compress.statistics import bounded_rows
from cairn.core.errors import ConfigError
from cairn.models.linear.form import Epilogue, finished
from cairn.models.quantized.matrices import NamedMatrix
from cairn.models.quantized.planes import Planes, dequantized
from cairn.models.quantized.round_model import rounded_parts, split_rows
from cairn.models.quantized.rounding import QuantizationGrid, rounded_activations
from cairn.models.transformer import Transformer

Method = Literal["rtn", "gptq", "awq", "smoothquant"]
FOUR_BITS = ("w4a16", "mxfp4", "nvfp4", "q4_0")


class QuantizeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the rounding of matrices."""

    method: Method
    ordered: bool = True  # gptq: columns with the largest inputs first
    strength: float | None = (
        None  # smoothquant: how much of an outlier moves; None: what loses least
    )
    keep: tuple[str, ...] = ()  # parts of names of matrices that stay in 16 bits
    most_added: float | None = (
        None  # share of perplexity; what is expected to cost more stays in 16 bits
    )


class MatrixError(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of rounding on a matrix: |error| / |output| on rows of the calibration text."""

    matrix: str
    error: float
    nearest: float  # of round to nearest on the same inputs


@dataclass
class Rounded:
    """Planes by the name of a slot, and how good they are."""

    planes: dict[str, Planes] = field(default_factory=dict)
    errors: list[MatrixError] = field(default_factory=list)
    costs: list[MatrixCost] = field(default_factory=list)  # where `most_added` was given
    kept: list[str] = field(default_factory=list)  # names of matrices in 16 bits
    # What a matrix was before it was rounded, where it may have to become that again.
    matrices: list[NamedMatrix] = field(default_factory=list)
    originals: dict[str, Tensor] = field(default_factory=dict)


def check_pair(scheme: str, method: Method) -> None:
    if method == "awq" and scheme not in FOUR_BITS:
        raise ConfigError(
            f"method awq is for 4 bits, and scheme {scheme} has 8",
            hint="use --method rtn: 8 bits lose little",
        )
    if method == "smoothquant" and scheme != "w8a8":
        raise ConfigError(
            f"method smoothquant is for 8-bit integer activations, which scheme {scheme} does not have",
            hint="use --scheme w8a8, or --method gptq",
        )


def quantize_model(
    model: Transformer,
    windows_BL: Tensor,
    grid: QuantizationGrid,
    settings: QuantizeSettings,
    stored: torch.dtype,
    advance: Callable[[str], None] = lambda words: None,
    chunk_windows: int = 8,
) -> Rounded:
    """Round every matrix of the layers; the model computes with the rounded weights afterwards."""
    made, columns = Rounded(), GraphedColumns()
    for walked in walk(model, windows_BL, settings.method == "gptq", chunk_windows):
        before = len(made.errors)
        _round_layer(walked, grid, settings, stored, made, columns)
        worst = max(made.errors[before:], key=lambda one: one.error, default=None)
        advance(f"{worst.matrix.split('.', 2)[2]} {worst.error:.4f}" if worst else "kept")
    if settings.most_added is not None:
        _keep_costly(model, windows_BL, grid, math.log1p(settings.most_added), made)
    return made


def _keep_costly(
    model: Transformer, windows_BL: Tensor, grid: QuantizationGrid, most_nats: float, made: Rounded
) -> None:
    """Matrices become again what they were, until what the others cost is small enough."""
    costs = matrix_costs(model, made.matrices, made.originals, windows_BL, grid)
    made.costs = with_kept(costs, most_nats)
    for matrix, cost in zip(made.matrices, made.costs, strict=True):
        if cost.kept:
            matrix.write(made.originals[matrix.name].to(matrix.read().device))
            assert matrix.linear is not None
            matrix.linear.take(None)
            made.planes = {k: v for k, v in made.planes.items() if k not in matrix.slots}
            made.kept.append(matrix.name)
    made.matrices, made.originals = [], {}
    if not made.planes:
        raise ConfigError(
            f"all matrices would stay in 16 bits for a divergence of {most_nats:.2g} nats",
            hint=f"use a larger --most-added: rounding all of them costs {sum(one.nats for one in costs):.2g}",
        )


@torch.no_grad()
def _round_layer(
    walked: LayerSites,
    grid: QuantizationGrid,
    settings: QuantizeSettings,
    stored: torch.dtype,
    made: Rounded,
    columns: RoundColumns,
) -> None:
    before = {site.matrix.name: site.matrix.read().float() for site in walked.sites}
    scales = dict(_scaled(walked, grid, settings, stored))
    for site in walked.sites:
        matrix, original_NK = site.matrix, before[site.matrix.name]
        unrounded_NK = _as_stored(matrix.read(), stored)  # as scales of its columns left it
        if any(part in matrix.name for part in settings.keep):
            matrix.write(unrounded_NK)
            made.kept.append(matrix.name)
            continue
        if settings.most_added is not None and matrix.linear is not None:
            made.matrices.append(matrix)
            made.originals[matrix.name] = unrounded_NK.to(stored).cpu()
        planes = _planes(site, grid, settings, stored, columns)
        made.planes |= dict(zip(matrix.slots, planes, strict=True))
        made.errors.append(_judge(site, planes, scales.get(matrix.name), original_NK, grid, stored))
        _put(matrix, planes, grid)


def _as_stored(w_NK: Tensor, stored: torch.dtype) -> Tensor:
    return w_NK.to(stored).to(w_NK.dtype)


def _scaled(
    walked: LayerSites, grid: QuantizationGrid, settings: QuantizeSettings, stored: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Fold scales into what makes each input; the scale of the columns of each matrix."""
    if settings.method not in ("awq", "smoothquant"):
        return
    for fold in folds_of(walked):
        if settings.method == "awq":
            scale_K = best_scale(fold, grid, stored)
        else:
            strengths = STRENGTHS if settings.strength is None else (settings.strength,)
            scale_K = helpful_scale(fold, strengths, grid, stored)
        apply_scales(fold, scale_K)
        yield from ((site.matrix.name, scale_K) for site in fold.sites)


def _planes(
    site: MatrixSite,
    grid: QuantizationGrid,
    settings: QuantizeSettings,
    stored: torch.dtype,
    columns: RoundColumns,
) -> list[Planes]:
    """Quantised planes of each slot of a matrix."""
    matrix, w_NK = site.matrix, site.matrix.read().float()
    if settings.method != "gptq":
        return list(rounded_parts(w_NK, matrix, grid, stored))
    hessian_KK = site.inputs.hessian_KK
    damping = damping_for(site.inputs.rows, len(hessian_KK))
    more = (settings.ordered, columns, damping)
    if grid.block_rows > 1:  # blocks do not reach from one tensor into the next
        parts = w_NK.split(list(matrix.rows))
        return [gptq(w, hessian_KK, grid, stored, matrix.name, *more) for w in parts]
    planes = gptq(w_NK, hessian_KK, grid, stored, matrix.name, *more)
    return split_rows(planes, list(matrix.rows))


def _judge(
    site: MatrixSite,
    planes: list[Planes],
    scale_K: Tensor | None,
    original_NK: Tensor,
    grid: QuantizationGrid,
    stored: torch.dtype,
) -> MatrixError:
    x_MK = bounded_rows(site.inputs.sample_MK.float())  # a giant row would be all that counts
    wanted_MN = x_MK @ original_NK.t()
    now_NK = site.matrix.read().float()
    scaled_MK = x_MK if scale_K is None else x_MK / scale_K
    made_MN = rounded_activations(scaled_MK, grid) @ _joined(planes).t()
    # Rows that a later fold has divided (v, up) are compared at the size that they had.
    input_K = 1.0 if scale_K is None else scale_K
    weight_N = original_NK.square().sum(1) / (now_NK / input_K).square().sum(1).clamp(min=1e-30)
    made_MN = made_MN * weight_N.sqrt()
    nearest = rounded_parts(original_NK, site.matrix, grid, stored)
    nearest_MN = rounded_activations(x_MK, grid) @ _joined(nearest).t()
    size = wanted_MN.norm().clamp(min=1e-30)
    return MatrixError(
        matrix=site.matrix.name,
        error=float((made_MN - wanted_MN).norm() / size),
        nearest=float((nearest_MN - wanted_MN).norm() / size),
    )


def _joined(planes: list[Planes]) -> Tensor:
    return torch.cat([dequantized(part) for part in planes])


def _put(matrix: NamedMatrix, planes: list[Planes], grid: QuantizationGrid) -> None:
    """Replace a matrix by its quantised values, so that the model computes with what a file will contain."""
    matrix.write(_joined(planes))
    if matrix.linear is not None and grid.activations != "float":
        matrix.linear.take(RoundedInputForm(matrix, grid))


class RoundedInputForm:
    """A form whose weights are rounded already and whose activations are rounded on the way in."""

    nbytes = 0  # none of its own

    def __init__(self, matrix: NamedMatrix, grid: QuantizationGrid) -> None:
        self.matrix, self.grid = matrix, grid

    def covers(self, rows: int) -> bool:
        return True

    def after(self, weight_K: Tensor) -> None:
        return None

    def product(self, x_MK: Tensor, bias_N: Tensor | None, epilogue: Epilogue) -> Tensor:
        x_MK = rounded_activations(x_MK, self.grid)
        return finished(
            torch.nn.functional.linear(x_MK, self.matrix.read(), bias_N), None, epilogue
        )
