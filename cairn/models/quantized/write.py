"""Planes as the tensors of a compressed-tensors checkpoint, which transformers, vLLM and `cairn serve` load.

    pack-quantized          int4: eight levels to an int32, a scale per group
    int-quantized           int8 by row; activations by token
    float-quantized         e4m3 by row or in blocks of 128 x 128
    mxfp4-, nvfp4-pack-...  two e2m1 codes to a byte, scales as e8m0 or as e4m3 under one float32 scale

Writes no field that compressed-tensors 0.17 does not know.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cairn.core.errors import UnsupportedModel
from cairn.models.checkpoint_names import source
from cairn.models.export import export, tensors
from cairn.models.quantized.matrices import matrices_of
from cairn.models.quantized.planes import Planes
from cairn.models.quantized.rounding import QuantizationGrid
from cairn.models.quantized.stored_planes import check_shared_rows, stored_planes
from cairn.models.stacked_experts import STACKED_FAMILIES
from cairn.models.transformer import Transformer

FORMATS = {
    "int4": "pack-quantized",
    "int8": "int-quantized",
    "fp8": "float-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}


@dataclass(frozen=True)
class QuantizedModel:
    """A model of which some matrices are planes; all else is written as its parameters are."""

    model: Transformer
    planes: Mapping[str, Planes]  # by the name of a slot: layers.0.attention.qkv.q.weight
    grid: QuantizationGrid
    stored: torch.dtype  # of scales and of what is not quantised


def write_compressed_tensors(
    quantized: QuantizedModel, folder: Path, *, like: Path | None = None
) -> None:
    """A new folder with config and weights; the tokenizer's files are copied from `like`."""
    check_family(quantized.model)
    check_shared_rows(quantized.model, quantized.planes, quantized.grid.block_rows)
    export(
        quantized.model,
        folder,
        like=like,
        stream=stored_tensors(quantized),
        dtype=quantized.stored,
        more={"quantization_config": quantization_config(quantized)},
    )


def check_family(model: Transformer) -> None:
    if model.spec.family == "gpt2":
        raise UnsupportedModel(
            "gpt2 checkpoints store their matrices transposed, and are not written quantised",
            hint="use a model of another family, or quantise as it is served: --weights",
        )
    # Left in floating point, as a reader would take them, they would be most of the file.
    if model.spec.family in STACKED_FAMILIES:
        raise UnsupportedModel(
            f"{model.spec.family} checkpoints store all experts in one tensor, and are not written quantised",
            hint="use a model of another family, or quantise as it is served: --weights",
        )


def stored_tensors(quantized: QuantizedModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint under its name."""
    planes = stored_planes(quantized.model, quantized.planes)
    for name, tensor in tensors(quantized.model):
        if name in planes:
            packed = pack(planes[name], quantized.stored, quantized.grid.symmetric)
            prefix = name.removesuffix("weight")
            yield from ((f"{prefix}{part}", value.cpu()) for part, value in packed.items())
        elif tensor.is_floating_point() and tensor.dtype != quantized.stored:
            keeps = name.endswith("e_score_correction_bias")  # its steps are small: float32
            yield name, tensor if keeps else tensor.to(quantized.stored)
        else:
            yield name, tensor


def pack(planes: Planes, stored: torch.dtype, symmetric: bool = True) -> dict[str, Tensor]:
    """The tensors of one linear map: weight or weight_packed, and what belongs to it.

    `symmetric`: the config says that there are no zero points, so that none are written where all are in the middle.
    """
    if planes.kind == "int4":
        return _pack_int4(planes, stored, symmetric)
    if planes.kind in ("int8", "fp8"):
        return {"weight": planes.levels_NK, "weight_scale": planes.scales.to(stored)}
    bytes_NH = planes.levels_NK[:, ::2] | planes.levels_NK[:, 1::2] << 4
    if planes.kind == "mxfp4":
        exponents = planes.scales.log2().round().to(torch.int32) + 127
        return {"weight_packed": bytes_NH, "weight_scale": exponents.to(torch.uint8)}
    top = planes.global_scale or 448.0 / float(planes.scales.max())
    return {
        "weight_packed": bytes_NH,
        "weight_scale": (planes.scales * top).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([top], dtype=torch.float32),
    }


def _pack_int4(planes: Planes, stored: torch.dtype, symmetric: bool) -> dict[str, Tensor]:
    made = {
        "weight_packed": packed_nibbles(planes.levels_NK),
        "weight_scale": planes.scales.to(stored),
        "weight_shape": torch.tensor(planes.shape),
    }
    shifts = planes.shifts if planes.shifts is not None else torch.zeros_like(planes.scales)
    zeros_NG = (-shifts / planes.scales).round().to(torch.uint8)
    if not symmetric or not bool((zeros_NG == 8).all()):
        made["weight_zero_point"] = packed_nibbles(zeros_NG.t()).t().contiguous()
    return made


def packed_nibbles(levels_NK: Tensor) -> Tensor:
    """Eight levels 0..15 to an int32, the first lowest; columns are padded with zeros."""
    columns = levels_NK.shape[1]
    padded = torch.nn.functional.pad(levels_NK, (0, -columns % 8)).to(torch.int32)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=levels_NK.device)
    # Nibbles do not overlap, so that the sum is the union; int32 wraps at the top one.
    return (padded.unflatten(1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32)


def quantization_config(quantized: QuantizedModel) -> dict[str, Any]:
    """`quantization_config` for config.json."""
    model, grid = quantized.model, quantized.grid
    kind = grid.kind
    group = {
        "targets": ["Linear"],
        "weights": _weights(grid),
        "input_activations": _activations(grid),
        "output_activations": None,
        "format": FORMATS[kind],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *_routers(model), *_kept(quantized)],
        "kv_cache_scheme": None,
    }


def _weights(grid: QuantizationGrid) -> dict[str, Any]:
    strategy = "block" if grid.block_rows > 1 else "group" if grid.group else "channel"
    strategy = "tensor_group" if grid.kind == "nvfp4" else strategy
    return {
        "num_bits": 8 if grid.kind in ("int8", "fp8") else 4,
        "type": "int" if grid.kind.startswith("int") else "float",
        "symmetric": grid.symmetric,
        "strategy": strategy,
        "group_size": grid.group or None if strategy != "block" else None,
        "block_structure": [grid.block_rows, grid.group] if strategy == "block" else None,
        "dynamic": False,
    }


def _activations(grid: QuantizationGrid) -> dict[str, Any] | None:
    if grid.activations == "float":
        return None
    return {
        "num_bits": 8,
        "type": "int" if grid.kind == "int8" else "float",
        "symmetric": True,
        "strategy": grid.activations,
        "group_size": 128 if grid.activations == "group" else None,
        "dynamic": True,
    }


def _kept(quantized: QuantizedModel) -> list[str]:
    """Matrices of the layers that stay as they are."""
    model = quantized.model
    layers = [matrices_of(layer, number) for number, layer in enumerate(model.layers)]
    slots = [slot for matrices in layers for one in matrices for slot in one.slots]
    kept = [slot for slot in slots if slot not in quantized.planes]
    names = (source(model.spec.family, slot).tensor.removesuffix(".weight") for slot in kept)
    return list(dict.fromkeys(names))


def _routers(model: Transformer) -> list[str]:
    names = (slot.name for slot in model.slots() if slot.name.endswith(".router.weight"))
    return [source(model.spec.family, name).tensor.removesuffix(".weight") for name in names]
