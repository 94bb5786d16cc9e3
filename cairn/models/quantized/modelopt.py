"""Matrices as NVIDIA's ModelOpt stores them.

FP8     weight e4m3 [N, K], weight_scale, input_scale: one number each, or a scale per row
NVFP4   weight uint8 [N, K/2], weight_scale e4m3 [N, K/16], weight_scale_2: w = e2m1 * scale * scale_2, where
        compressed-tensors divides by its global scale
"""

import torch

from cairn.models.quantized.bit_packing import nibbles
from cairn.models.quantized.compressed_tensors import input_scale
from cairn.models.quantized.planes import Planes
from cairn.models.quantized.scheme import QuantizationScheme
from cairn.models.quantized.stored_matrix import (
    BYTES,
    FLOATS,
    FP8,
    ONE,
    ExpectedTensor,
    StoredLayout,
    StoredMatrix,
)

GROUP = 16


def fp8_layout(stored: StoredMatrix, scheme: QuantizationScheme) -> StoredLayout:
    shape = stored.matrix("weight")
    tensors = {"weight": ExpectedTensor(shape, FP8)}
    tensors["weight_scale"] = ExpectedTensor(ONE if scheme.block_rows == 0 else (shape[0],), FLOATS)
    if scheme.activations == "tensor":
        tensors["input_scale"] = ExpectedTensor(ONE, FLOATS)
    return StoredLayout(shape, tensors)


def fp8_planes(
    stored: StoredMatrix, scheme: QuantizationScheme, device: torch.device | str
) -> Planes:
    levels_NK = stored.tensor("weight", device)
    rows, columns = levels_NK.shape
    scales = stored.scale("weight_scale", device).reshape(-1, 1)
    static = scheme.activations == "tensor"
    known = input_scale(stored, "input_scale") if static else None
    return Planes(
        "fp8",
        levels_NK,
        scales,
        None,
        columns,
        scheme.block_rows or rows,
        None,
        scheme.activations,
        known,
    )


def nvfp4_layout(stored: StoredMatrix, scheme: QuantizationScheme) -> StoredLayout:
    rows, half = stored.matrix("weight")
    tensors = {
        "weight": ExpectedTensor((rows, half), BYTES),
        "weight_scale": ExpectedTensor((rows, -(-2 * half // GROUP)), FP8),
        "weight_scale_2": ExpectedTensor(ONE, FLOATS),
    }
    return StoredLayout((rows, 2 * half), tensors)


def nvfp4_planes(
    stored: StoredMatrix, scheme: QuantizationScheme, device: torch.device | str
) -> Planes:
    whole = stored.scale("weight_scale_2", device).reshape(())
    scales_NG = stored.scale("weight_scale", device) * whole
    codes_NK = nibbles(stored.tensor("weight", device))
    return Planes("nvfp4", codes_NK, scales_NG, None, GROUP, global_scale=1 / float(whole))
