"""Frozen weights in NF4 with double quantisation, the base of QLoRA (arXiv:2305.14314): 4.127 bits a weight.

    64 values share a scale     value -> the nearest of 16 quantiles of a normal distribution, two to a byte, first high
    256 scales share a scale    scale - mean of all scales -> one of 256 levels of a "dynamic" map

The bytes are those of bitsandbytes. A product dequantises the matrix, forward and backward, and keeps neither.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cairn.models.linear.form import PLAIN, Epilogue, Product, finished

BLOCK, SCALES = 64, 256
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
TINY = 1e-38


class NF4(NamedTuple):
    """A matrix in NF4; its scales are quantised as well."""

    packed: Tensor  # uint8, two values each
    scales: Tensor  # uint8, one for each block of values
    scale_of_scales: Tensor  # float32, one for each 256 scales
    mean: Tensor  # float32 scalar, of all scales
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        parts = (self.packed, self.scales, self.scale_of_scales, self.mean)
        return sum(part.nbytes for part in parts)


def quantize_nf4(weight: Tensor) -> NF4:
    scaled, absmax = _scaled(weight.detach().float().flatten(), BLOCK)
    codes = _nearest(F.pad(scaled, (0, len(scaled) % 2)), _levels(weight.device))
    mean = absmax.mean()
    rest, scale_of_scales = _scaled(absmax - mean, SCALES)
    scales = _nearest(rest, dynamic_map(weight.device))
    packed = (codes[::2] << 4) | codes[1::2]
    return NF4(packed, scales, scale_of_scales, mean, tuple(weight.shape))


def dequantize_nf4(nf4: NF4, dtype: torch.dtype) -> Tensor:
    levels = dynamic_map(nf4.packed.device)[nf4.scales.long()]
    absmax = levels * _repeated(nf4.scale_of_scales, SCALES, len(levels)) + nf4.mean
    codes = torch.stack([nf4.packed >> 4, nf4.packed & 15], dim=1).flatten()
    count = torch.Size(nf4.shape).numel()
    values = _levels(nf4.packed.device)[codes[:count].long()]
    return (values * _repeated(absmax, BLOCK, count)).reshape(nf4.shape).to(dtype)


def dynamic_map(device: torch.device | str = "cpu") -> Tensor:
    """256 levels in [-1, 1], sorted: seven decades, of which each larger one is cut twice as finely."""
    levels = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        levels += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(levels), dtype=torch.float32, device=device)


class NF4Form:
    """The form of a frozen linear map."""

    def __init__(self, weight_NK: Tensor) -> None:
        self.quantized = quantize_nf4(weight_NK)

    @property
    def nbytes(self) -> int:
        return self.quantized.nbytes

    def covers(self, rows: int) -> bool:
        return True

    def after(self, weight_K: Tensor) -> None:
        return None

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Product:
        return finished(_Product.apply(x_MK, self.quantized), bias_N, epilogue)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight: NF4) -> Tensor:  # type: ignore[override]
        ctx.weight = weight
        return F.linear(x_MK, dequantize_nf4(weight, x_MK.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        return grads[0] @ dequantize_nf4(ctx.weight, grads[0].dtype), None


def _levels(device: torch.device | str) -> Tensor:
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)


def _scaled(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Values in [-1, 1], and the largest magnitude of each block; the last block may be short."""
    blocks = F.pad(values, (0, -len(values) % block)).view(-1, block)
    absmax = blocks.abs().amax(1)
    scaled = blocks * (1.0 / absmax.clamp(min=TINY))[:, None]
    return scaled.clamp(-1, 1).flatten()[: len(values)], absmax


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    return torch.bucketize(values, (levels[:-1] + levels[1:]) / 2).to(torch.uint8)


def _repeated(scales: Tensor, block: int, count: int) -> Tensor:
    return scales.repeat_interleave(block)[:count]
