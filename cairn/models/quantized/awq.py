"""Matrices as AutoAWQ's "gemm" version stores them: transposed, packed along N in an order of its own.

qweight int32 [K, N/8], qzeros int32 [K/g, N/8], scales [K/g, N]; w = (level - zero) * scale.
"""

import torch
from torch import Tensor

from cairn.models.quantized.bit_packing import unpacked
from cairn.models.quantized.planes import Planes
from cairn.models.quantized.scheme import QuantizationScheme
from cairn.models.quantized.stored_matrix import (
    FLOATS,
    WORDS,
    ExpectedTensor,
    StoredLayout,
    StoredMatrix,
    groups,
    integer_planes,
)

VALUES = 8  # of 4 bits in a word
PLACES = (
    0,
    4,
    1,
    5,
    2,
    6,
    3,
    7,
)  # which nibble of a word holds column i: columns 0 2 4 6 1 3 5 7 lie there


def layout(stored: StoredMatrix, scheme: QuantizationScheme) -> StoredLayout:
    columns, words = stored.matrix("qweight")
    rows, each = words * VALUES, groups(columns, scheme.group)
    tensors = {
        "qweight": ExpectedTensor((columns, words), WORDS),
        "qzeros": ExpectedTensor((each, words), WORDS),
        "scales": ExpectedTensor((each, rows), FLOATS),
    }
    return StoredLayout((rows, columns), tensors)


def planes(stored: StoredMatrix, scheme: QuantizationScheme, device: torch.device | str) -> Planes:
    levels_NK = _in_order(stored.tensor("qweight", device)).t().contiguous()
    zeros_NG = _in_order(stored.tensor("qzeros", device)).t().float()
    scales_NG = stored.scale("scales", device).t().contiguous()
    return integer_planes(levels_NK, zeros_NG, scales_NG, 4, scheme.group)


def _in_order(words_RW: Tensor) -> Tensor:
    values_RWV = unpacked(words_RW, 4, words_RW.shape[1] * VALUES).unflatten(1, (-1, VALUES))
    return values_RWV[..., PLACES].flatten(1)
