"""Experts that a checkpoint stores in MXFP4 stay packed on a GPU, where a kernel multiplies with them.

gpt-oss is published so: 4.25 bits a weight instead of 16. They stay packed where floats would take most of the memory.
A few tokens are faster packed (`kernels.experts.few_mxfp4`); many unpack tiles in the grouped kernel, whose time beside
bfloat16's is not known. Elsewhere, and where experts are split over ranks or chosen by groups, `weights.load`
dequantises them into parameters; `--weights mxfp4` packs those again, without a change.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.core.errors import UnsupportedModel
from cairn.kernels.experts.matrices import HIGHEST, Mxfp4Experts, pack_mxfp4
from cairn.models.build import Slot
from cairn.models.experts import ExpertLayer
from cairn.models.quantized.load import QuantizedSource, Where
from cairn.models.transformer import Transformer
from cairn.models.weights_fit import free_bytes

LARGEST_SHARE = 0.6  # of the free memory, for experts in floating point
ONE = 127  # the exponent that stands for a scale of 1


class KeptExperts(NamedTuple):
    """A layer whose experts stay packed, and where they come from."""

    layer: ExpertLayer
    inner: list[list[Slot]]  # of each expert: its parts, in the order of their rows
    down: list[list[Slot]]

    @property
    def slots(self) -> list[Slot]:
        return [slot for parts in (*self.inner, *self.down) for slot in parts]


def packed_experts(
    model: Transformer, where: Where, tensors: QuantizedSource, device: torch.device | str
) -> list[KeptExperts]:
    found = []
    for path, layer in model.named_modules():
        if isinstance(layer, ExpertLayer) and layer.experts.groups == 1 and layer.shards.size == 1:
            kept = kept_experts(layer, path)
            kinds = (tensors.planes_shape(where[slot.name].tensor) for slot in kept.slots)
            if all(kind is not None and kind.kind == "mxfp4" for kind in kinds):
                found.append(kept)
    values = sum(math.prod(slot.shape) for kept in found for slot in kept.slots)
    return found if stays_packed(device, values * model.build.dtype.itemsize) else []


def stays_packed(device: torch.device | str, float_bytes: int) -> bool:
    """Return whether experts stay packed because their dequantised size would fill the GPU."""
    if torch.device(device).type != "cuda":
        return False
    free = free_bytes(str(device))
    return free is not None and float_bytes > LARGEST_SHARE * free


def kept_experts(layer: ExpertLayer, path: str) -> KeptExperts:
    by_name = {slot.name: slot.under(path) for slot in layer.slots()}
    count = range(layer.experts.count)
    return KeptExperts(
        layer,
        [[by_name[f"{expert}.{part}.weight"] for part in layer.parts] for expert in count],
        [[by_name[f"{expert}.down.weight"]] for expert in count],
    )


def give_expert_forms(
    kept: list[KeptExperts],
    where: Where,
    tensors: QuantizedSource,
    device: torch.device | str,
    progress: Callable[[int], None],
) -> None:
    for layer, *both in kept:
        inner, down = (_packed(slots, where, tensors, device) for slots in both)
        layer.forms = inner, down
        progress(inner.nbytes + down.nbytes)


def _packed(
    experts: list[list[Slot]], where: Where, tensors: QuantizedSource, device: torch.device | str
) -> Mxfp4Experts:
    codes: list[Tensor] = []
    exponents: list[Tensor] = []
    for slots in experts:
        parts = [tensors.planes(where[slot.name].tensor, device) for slot in slots]
        codes.append(torch.cat([part.levels_NK for part in parts]))
        scale_NG = torch.cat([part.scales for part in parts])
        exponents.append(scale_NG.log2().round().int() + ONE)
    exponent_ENG = torch.stack(exponents)
    if int(exponent_ENG.max()) > HIGHEST or int(exponent_ENG.min()) < 1:
        raise UnsupportedModel(
            f"{where[experts[0][0].name].tensor} has a scale of 2^{int(exponent_ENG.abs().max()) - ONE}",
            hint="--weights float multiplies with them in floating point",
        )
    return pack_mxfp4(torch.stack(codes), exponent_ENG.to(torch.uint8))
