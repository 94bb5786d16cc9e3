"""Matrices as compressed-tensors stores them: packed integers, 8-bit integers and floats, NVFP4 and MXFP4.

pack-quantized          weight_packed int32 [N, K/8], weight_scale [N, K/g], weight_shape; levels stored + 2^(b-1)
    asymmetric          weight_zero_point int32 [N/8, K/g], packed along N, stored + 2^(b-1)
    act order           weight_g_idx int32 [K]: the group of each column
int-, float-quantized   weight int8 or e4m3 [N, K]; weight_scale by tensor, row, group or block
nvfp4-pack-quantized    weight_packed uint8 [N, K/2], weight_scale e4m3 [N, K/16], weight_global_scale:
                        w = e2m1 * scale / global
mxfp4-pack-quantized    weight_packed uint8 [N, K/2], weight_scale uint8 [N, K/32]: 2 ** (byte - 127)
"""

import math

import torch
from torch import Tensor

from cairn.core.errors import WeightsError
from cairn.models.quantized.bit_packing import nibbles, unpacked, words_for
from cairn.models.quantized.planes import Planes
from cairn.models.quantized.scheme import QuantizationScheme
from cairn.models.quantized.stored_matrix import (
    BYTES,
    FLOATS,
    FP8,
    ONE,
    WORDS,
    ExpectedTensor,
    StoredLayout,
    StoredMatrix,
    groups,
    integer_planes,
)

Device = torch.device | str
MX_BIAS, MX_NAN = 127, 255  # of an e8m0 exponent


# -- pack-quantized -------------------------------------------------------------------------------


def packed_layout(stored: StoredMatrix, scheme: QuantizationScheme) -> StoredLayout:
    rows, columns = _true_shape(stored, scheme)
    each = groups(columns, scheme.group)
    tensors = {
        "weight_packed": ExpectedTensor((rows, words_for(columns, scheme.bits)), WORDS),
        "weight_scale": ExpectedTensor((rows, each), FLOATS),
        "weight_shape": ExpectedTensor((2,), (torch.int64, torch.int32)),
    }
    if not scheme.symmetric:
        tensors["weight_zero_point"] = ExpectedTensor((words_for(rows, scheme.bits), each), WORDS)
    if "weight_g_idx" in stored:
        tensors["weight_g_idx"] = ExpectedTensor((columns,), WORDS)
    return StoredLayout((rows, columns), tensors)


def packed_planes(stored: StoredMatrix, scheme: QuantizationScheme, device: Device) -> Planes:
    rows, columns = _true_shape(stored, scheme)
    levels_NK = unpacked(stored.tensor("weight_packed", device), scheme.bits, columns)
    scales_NG = stored.scale("weight_scale", device)
    zeros: Tensor | int = 1 << scheme.bits - 1
    if not scheme.symmetric:
        packed_GW = stored.tensor("weight_zero_point", device).t()
        zeros = unpacked(packed_GW, scheme.bits, rows).t().float()
    g_idx = stored.tensor("weight_g_idx", device) if "weight_g_idx" in stored else None
    return integer_planes(levels_NK, zeros, scales_NG, scheme.bits, scheme.group, g_idx)


def _true_shape(stored: StoredMatrix, scheme: QuantizationScheme) -> tuple[int, int]:
    """Shape of the matrix; the last word of a row may contain padding."""
    rows, words = stored.matrix("weight_packed")
    shape = stored.tensor("weight_shape").tolist()
    if len(shape) != 2 or shape[0] != rows or words_for(shape[1], scheme.bits) != words:
        raise WeightsError(
            f"{stored.module}.weight_packed has shape {[rows, words]}, and weight_shape says {shape} in "
            f"{scheme.bits} bits",
            hint="the file is truncated, or quantization_config names another number of bits",
        )
    return shape[0], shape[1]


# -- int-quantized and float-quantized ------------------------------------------------------------


def eight_bit_layout(stored: StoredMatrix, scheme: QuantizationScheme) -> StoredLayout:
    shape = stored.matrix("weight")
    weight = FP8 if scheme.format == "float-quantized" else (torch.int8,)
    tensors = {
        "weight": ExpectedTensor(shape, weight),
        "weight_scale": ExpectedTensor(scale_shape(shape, scheme), FLOATS),
    }
    if not scheme.symmetric:
        tensors["weight_zero_point"] = ExpectedTensor(tensors["weight_scale"].shape, (torch.int8,))
    if scheme.activations == "tensor":
        tensors["input_scale"] = ExpectedTensor(ONE, FLOATS)
    return StoredLayout(shape, tensors)


def eight_bit_planes(stored: StoredMatrix, scheme: QuantizationScheme, device: Device) -> Planes:
    levels_NK = stored.tensor("weight", device)
    rows, columns = levels_NK.shape
    scales = stored.scale("weight_scale", device).reshape(-1, groups(columns, scheme.group))
    shifts = None
    if not scheme.symmetric:
        zeros = stored.tensor("weight_zero_point", device).float()
        shifts = -zeros.reshape(scales.shape) * scales
    return Planes(
        "fp8" if scheme.format == "float-quantized" else "int8",
        levels_NK,
        scales,
        shifts,
        scheme.group or columns,
        scheme.block_rows or rows,
        None,
        scheme.activations,
        input_scale(stored, "input_scale") if scheme.activations == "tensor" else None,
    )


def scale_shape(shape: tuple[int, int], scheme: QuantizationScheme) -> tuple[int, ...]:
    """Shape of the scales: by tensor, row, group or block."""
    rows, columns = shape
    if scheme.block_rows == 0:
        return ONE
    return math.ceil(rows / scheme.block_rows), groups(columns, scheme.group)


def input_scale(stored: StoredMatrix, part: str) -> float:
    return float(stored.scale(part).reshape(()))


# -- nvfp4 and mxfp4 ------------------------------------------------------------------------------


def four_bit_layout(stored: StoredMatrix, scheme: QuantizationScheme) -> StoredLayout:
    rows, half = stored.matrix("weight_packed")
    columns, nv = 2 * half, scheme.format == "nvfp4-pack-quantized"
    tensors = {
        "weight_packed": ExpectedTensor((rows, half), BYTES),
        "weight_scale": ExpectedTensor((rows, groups(columns, scheme.group)), FP8 if nv else BYTES),
    }
    if nv:
        tensors["weight_global_scale"] = ExpectedTensor(ONE, FLOATS)
    return StoredLayout((rows, columns), tensors)


def four_bit_planes(stored: StoredMatrix, scheme: QuantizationScheme, device: Device) -> Planes:
    codes_NK = nibbles(stored.tensor("weight_packed", device))
    if scheme.format == "nvfp4-pack-quantized":
        whole = stored.scale("weight_global_scale", device).reshape(())
        scales_NG = stored.scale("weight_scale", device) / whole
        return Planes("nvfp4", codes_NK, scales_NG, None, 16, global_scale=float(whole))
    scales_NG = powers_of_two(
        stored.tensor("weight_scale", device), f"{stored.module}.weight_scale"
    )
    return Planes("mxfp4", codes_NK, scales_NG, None, 32)


def powers_of_two(exponents: Tensor, name: str) -> Tensor:
    """e8m0: 2 ** (byte - 127); 255 is NaN."""
    if (exponents == MX_NAN).any():
        raise WeightsError(
            f"{name} has {int((exponents == MX_NAN).sum())} scales that are NaN",
            hint="the checkpoint is damaged or was quantised wrongly: fetch or make it again",
        )
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - MX_BIAS)
