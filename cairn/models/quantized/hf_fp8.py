"""Matrices as transformers' own fp8 stores them (Qwen3-*-FP8, DeepSeek), and AutoFP8 before it.

weight e4m3 [N, K]; weight_scale_inv, which multiplies despite its name: [ceil(N/128), ceil(K/128)], or one number.
AutoFP8 calls it weight_scale, and so does FBGEMM, which has one for each row: [N, 1]. Static activations have one
scale: activation_scale, or input_scale.
"""

import torch

from cairn.models.quantized.compressed_tensors import input_scale, scale_shape
from cairn.models.quantized.planes import Planes
from cairn.models.quantized.scheme import QuantizationScheme
from cairn.models.quantized.stored_matrix import (
    FLOATS,
    FP8,
    ONE,
    ExpectedTensor,
    StoredLayout,
    StoredMatrix,
    groups,
)

SCALES = (*FLOATS, torch.float8_e8m0fnu)


def layout(stored: StoredMatrix, scheme: QuantizationScheme) -> StoredLayout:
    shape, scale = stored.matrix("weight"), _scale_part(stored)
    tensors = {
        "weight": ExpectedTensor(shape, FP8),
        scale: ExpectedTensor(scale_shape(shape, scheme), SCALES),
    }
    if scheme.activations == "tensor":
        tensors[_input_part(stored)] = ExpectedTensor(ONE, FLOATS)
    return StoredLayout(shape, tensors)


def planes(stored: StoredMatrix, scheme: QuantizationScheme, device: torch.device | str) -> Planes:
    levels_NK = stored.tensor("weight", device)
    rows, columns = levels_NK.shape
    scales = stored.scale(_scale_part(stored), device).reshape(-1, groups(columns, scheme.group))
    static = scheme.activations == "tensor"
    return Planes(
        "fp8",
        levels_NK,
        scales,
        None,
        scheme.group or columns,
        scheme.block_rows or rows,
        None,
        scheme.activations,
        input_scale(stored, _input_part(stored)) if static else None,
    )


def _scale_part(stored: StoredMatrix) -> str:
    return "weight_scale" if "weight_scale" in stored else "weight_scale_inv"


def _input_part(stored: StoredMatrix) -> str:
    return "input_scale" if "input_scale" in stored else "activation_scale"
