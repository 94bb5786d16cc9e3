"""The frozen weights under an adapter in 4 bits (QLoRA, arXiv:2305.14314).

quantize_base(model)    the maps of the layers multiply in NF4 from now on, and their floats are given back
round_base(model)       floats that are rounded as those were: what the adapter was trained on, for merging
"""

from collections.abc import Iterator

import torch
from torch import nn

from cairn.kernels.quantize.nf4 import dequantize_nf4, quantize_nf4
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear
from cairn.models.linear.nf4 import NF4Form


def quantize_base(model: nn.Module) -> int:
    """Quantise the linear maps to NF4; returns their size in bytes."""
    total = 0
    for part in _maps(model):
        form = NF4Form(part.joined())
        part.take(form)
        part.release()
        total += form.nbytes
    return total


@torch.no_grad()
def round_base(model: nn.Module) -> None:
    for part in _maps(model):
        weights = part.matrices()
        rounded_NK = dequantize_nf4(quantize_nf4(part.joined()), weights[0].dtype)
        rows = [len(weight) for weight in weights]
        for owner, own_NK in zip(part.owners(), rounded_NK.split(rows), strict=True):
            owner.weight = nn.Parameter(own_NK.clone(), requires_grad=False)


def _maps(model: nn.Module) -> Iterator[ColumnParallelLinear | RowParallelLinear]:
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield module
