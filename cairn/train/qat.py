"""Training with fake quantisation: products see rounded weights, gradients pass through the rounding unchanged.

    y = round(x) @ round(w).T        dx = g @ round(w)        dw = g.T @ round(x)

The rounding is that of `models.quantized.rounding`, which makes the file in the end, so that the model that was
trained is the model that is served. It is another kind of `Products`, in the plain and in the fused form.
"""

from pathlib import Path

import torch
from torch import Tensor

from cairn.core.errors import ConfigError
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import open_checkpoint
from cairn.models.quantized.round_model import round_model
from cairn.models.quantized.rounding import (
    QuantizationGrid,
    fake_quantized,
    fitted,
    rounded_activations,
)
from cairn.models.quantized.write import write_compressed_tensors
from cairn.models.spec import ModelSpec
from cairn.models.weights import load_model
from cairn.train.config import Train
from cairn.train.products import Kept, OfWeight, Products, make_products


class FakeQuantized:
    """Products of a grid, with the straight-through gradient (arXiv:1308.3432)."""

    def __init__(self, grid: QuantizationGrid) -> None:
        self.grid = grid

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, Kept]:
        w_NK = fake_quantized(w_NK, self.grid, w_NK.dtype)
        return rounded_activations(x_MK, self.grid) @ w_NK.t(), ()

    def backward(self, g_MN: Tensor, w_NK: Tensor, kept: Kept) -> tuple[Tensor, OfWeight]:
        w_NK = fake_quantized(w_NK, self.grid, w_NK.dtype)
        return g_MN @ w_NK, lambda x_MK: g_MN.t() @ rounded_activations(x_MK, self.grid)


def products_of(config: Train, spec: ModelSpec) -> Products:
    """Matmul implementation of a run: plain, fp8, or fake-quantised."""
    grid = grid_of(config, spec)
    return make_products(config.precision.fp8) if grid is None else FakeQuantized(grid)


def grid_of(config: Train, spec: ModelSpec) -> QuantizationGrid | None:
    """The grid that a run rounds to; None: it does not round."""
    qat = config.qat
    if qat.scheme == "none":
        return None
    if config.precision.fp8 != "none":
        raise ConfigError(
            f"qat.scheme {qat.scheme} and precision.fp8 {config.precision.fp8} both round the products",
            hint="leave one of them out",
        )
    if config.parallel.tp > 1:
        raise ConfigError(
            f"qat with tp {config.parallel.tp} would round parts of groups",
            hint="use fsdp, dp or pp",
        )
    if spec.experts is not None:
        raise ConfigError(
            f"qat rounds dense layers, and this {spec.family} model has experts",
            hint="quantise it after training: cairn quantize",
        )
    widths = [spec.hidden, spec.intermediate, spec.heads * spec.head_dim]
    return fitted(qat.scheme, widths, qat.group or None)[0]


def export_quantized(model: Path, out: Path, grid: QuantizationGrid) -> None:
    """The exported model of a run, rounded as it was trained, beside it."""
    opened = open_checkpoint(model)
    stored = opened.stored_dtype()
    loaded = load_model(opened.spec, opened.tensors, ModelBuild("cpu", stored))
    write_compressed_tensors(round_model(loaded.to(torch.float32), grid, stored), out, like=model)
