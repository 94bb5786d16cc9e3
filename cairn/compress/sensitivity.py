"""Sensitivity of each matrix to rounding, estimated with one forward and one backward pass.

    KL ~ 1/2 E (g . d)^2        d: error of what the matrix gives out        g: gradient of log p(token) there

The tokens of g are drawn from the model's own predictions, which makes the mean a Fisher information. Errors of
different matrices and tokens are taken as independent, so that costs add up. Matrices of experts are not judged:
their rows are chosen by a router.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from cairn.compress.layer_by_layer import embedded, run_one
from cairn.models.linear.form import AnyRows, Epilogue, finished
from cairn.models.quantized.matrices import NamedMatrix
from cairn.models.quantized.rounding import QuantizationGrid, rounded_activations
from cairn.models.transformer import Transformer

TOKENS = 4096  # that are enough for an order of the matrices


class MatrixCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of rounding a matrix in divergence, and of keeping it in bytes."""

    matrix: str
    nats: float  # of divergence, a token
    bytes: int  # that 16 bits would add
    kept: bool = False


class _Probe(AnyRows):
    """A form that multiplies with the rounded weights and adds up (g . d)^2 on the way back."""

    nbytes = 0

    def __init__(self, matrix: NamedMatrix, original_NK: Tensor, grid: QuantizationGrid) -> None:
        self.w_NK, self.original_NK, self.grid = matrix.read(), original_NK, grid
        self.total = 0.0

    def product(self, x_MK: Tensor, bias_N: Tensor | None, epilogue: Epilogue) -> Tensor:
        y_MN = linear(x_MK, self.w_NK, bias_N)
        y_MN.register_hook(lambda slope_MN: self._add(x_MK.detach(), slope_MN))
        return finished(y_MN, None, epilogue)

    def _add(self, x_MK: Tensor, slope_MN: Tensor) -> None:
        rounded_MK = rounded_activations(x_MK, self.grid)
        original_NK = self.original_NK.to(x_MK.device, x_MK.dtype)
        error_MN = linear(rounded_MK, self.w_NK) - linear(x_MK, original_NK)
        self.total += float((slope_MN * error_MN).float().sum(1).square().sum())


def matrix_costs(
    model: Transformer,
    matrices: list[NamedMatrix],
    originals: Mapping[str, Tensor],
    windows_BL: Tensor,
    grid: QuantizationGrid,
) -> list[MatrixCost]:
    """`matrices`: linear maps that hold rounded weights; `originals`: what these were, by the matrix's name."""
    windows_BL = windows_BL[: max(1, TOKENS // windows_BL.shape[1])]
    chance = torch.Generator(windows_BL.device).manual_seed(0)
    with _probed(matrices, originals, grid) as probes:
        for window_1L in windows_BL.split(1):
            _forward_and_back(model, window_1L, chance)
    costs = [probe.total / 2 / windows_BL.numel() for probe in probes]
    return [
        MatrixCost(matrix=one.name, nats=nats, bytes=_more_bytes(one, grid))
        for one, nats in zip(matrices, costs, strict=True)
    ]


def with_kept(costs: list[MatrixCost], most_nats: float) -> list[MatrixCost]:
    """Keep the matrices with the largest cost per byte until the others cost at most `most_nats` in total."""
    left, names = sum(one.nats for one in costs), set[str]()
    for one in sorted(costs, key=lambda one: one.nats / one.bytes, reverse=True):
        if left <= most_nats:
            break
        names.add(one.matrix)
        left -= one.nats
    return [msgspec.structs.replace(one, kept=one.matrix in names) for one in costs]


@contextmanager
def _probed(
    matrices: list[NamedMatrix], originals: Mapping[str, Tensor], grid: QuantizationGrid
) -> Iterator[list[_Probe]]:
    """While this lasts, the maps multiply without rounding activations, through which no slope would pass."""
    maps = [one.linear for one in matrices]
    forms = [part.form for part in maps if part is not None]
    probes = [_Probe(one, originals[one.name], grid) for one in matrices]
    for part, probe in zip(maps, probes, strict=True):
        assert part is not None
        part.take(probe)
    try:
        yield probes
    finally:
        for part, form in zip(maps, forms, strict=True):
            assert part is not None
            part.take(form)


@torch.enable_grad()
def _forward_and_back(model: Transformer, window_1L: Tensor, chance: torch.Generator) -> None:
    with torch.no_grad():
        chunk = embedded(model, window_1L)
    chunk = chunk._replace(x_TD=chunk.x_TD.detach().requires_grad_())
    for layer in model.layers:
        chunk = chunk._replace(x_TD=run_one(layer, chunk))  # type: ignore[bad-argument-type]
    logits_TV = model.logits(model.norm(chunk.x_TD)).float()
    drawn_T1 = torch.multinomial(logits_TV.detach().softmax(-1), 1, generator=chance)
    cross_entropy(logits_TV, drawn_T1[:, 0], reduction="sum").backward()


def _more_bytes(matrix: NamedMatrix, grid: QuantizationGrid) -> int:
    rows, columns = matrix.read().shape
    bits = 8 if grid.kind in ("int8", "fp8") else 4
    return rows * columns * (16 - bits) // 8
