"""Folds an adapter into the weights of its base, in float32, with one rounding at the end.

    LoRA   W + sBA                     DoRA   m / |W + sBA| * (W + sBA)

bfloat16 has 8 bits of mantissa, so an update far smaller than the weight may be rounded away: the report says how much
of the update is lost.
"""

from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from cairn.core.errors import ConfigError
from cairn.models.adapter.folder import read_adapter
from cairn.models.adapter.lora import EmbeddingLoRA, LoRA
from cairn.models.linear.maps import Linear, Vocabulary
from cairn.models.transformer import Transformer


class MergeError(NamedTuple):
    """Rounding error of merged weights in the stored dtype."""

    maps: int
    largest: float  # absolute, of any weight
    lost: float  # length of what was lost / length of the update


def merge_folder(model: Transformer, folder: Path) -> MergeError:
    """Merges the adapter in a folder into a model, whose type it may not have."""
    read_adapter(model, folder, torch.float32)
    return merge(model)


@torch.no_grad()
def merge(model: nn.Module) -> MergeError:
    """Every adapted map of a model multiplies with merged weights, and has no adapter any more."""
    largest, lost, update, maps = 0.0, 0.0, 0.0, 0
    for path, module in list(model.named_modules()):
        adapter = getattr(module, "adapter", None)
        if not isinstance(module, Linear) or not isinstance(adapter, LoRA | EmbeddingLoRA):
            continue
        if module.form is not None:
            raise ConfigError(
                f"{path} multiplies in another form than its parameters",
                hint="load the base dequantised, then merge",
            )
        for weight_NK, merged_NK in _merged(module, adapter):
            rounded_NK = merged_NK.to(weight_NK.dtype)
            error_NK = rounded_NK.double() - merged_NK.double()
            largest = max(largest, float(error_NK.abs().max()))
            lost += float(error_NK.square().sum())
            update += float((merged_NK - weight_NK.float()).double().square().sum())
            weight_NK.copy_(rounded_NK)
            maps += 1
        _detach(module)
    share = (lost / update) ** 0.5 if update else 0.0
    return MergeError(maps, largest, share)


def _merged(home: Linear, adapter: LoRA | EmbeddingLoRA) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a stored weight (a view of it) and its merged values in float32."""
    if isinstance(adapter, EmbeddingLoRA):
        weight_VD = cast(Vocabulary, home).weight.data
        delta_VD = adapter.scale * (adapter.b_Dr.float() @ adapter.a_rV.float()).t()
        return [(weight_VD, weight_VD.float() + delta_VD)]
    views = _views(home, [part.rows for part in adapter.parts])
    pairs = []
    for part, weight_NK in zip(adapter.parts, views, strict=True):
        if not part.rank:
            continue
        merged_NK = weight_NK.float() + adapter.delta(part)
        if adapter.dora:
            gain_N = adapter.magnitude(part).float() / merged_NK.norm(dim=1)
            merged_NK = gain_N[:, None] * merged_NK
        pairs.append((weight_NK, merged_NK))
    return pairs


def _views(home: Linear, rows: list[int]) -> list[Tensor]:
    """Views of the parameter rows of each part; weights mapped from a file are copied first."""
    for owner in home.owners():
        weight = cast(nn.Parameter, owner.weight)
        owner.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    matrices = [weight.data for weight in home.matrices()]
    return matrices if len(matrices) == len(rows) else list(matrices[0].split(rows))


def _detach(home: Linear) -> None:
    del home.adapter
    home.addend = None
    if isinstance(home, Vocabulary):
        home.lookup_addend = None
