"""Matrices as GPTQ stores them: transposed, packed along K, with a zero point for each group.

qweight int32 [K/8, N], qzeros int32 [K/g, N/8], scales [K/g, N], g_idx int32 [K]; w = (level - zero) * scale.
The first version of the format stores zero - 1, the second the zero.
"""

import torch

from cairn.core.errors import WeightsError
from cairn.models.quantized.bit_packing import WORD, unpacked, words_for
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


def layout(stored: StoredMatrix, scheme: QuantizationScheme) -> StoredLayout:
    words, rows = stored.matrix("qweight")
    if words * WORD % scheme.bits:
        raise WeightsError(
            f"{stored.module}.qweight has {words} words in a column, which {scheme.bits} bits do not divide",
            hint="quantization_config names another number of bits",
        )
    columns = words * WORD // scheme.bits
    each = groups(columns, scheme.group)
    tensors = {
        "qweight": ExpectedTensor((words, rows), WORDS),
        "qzeros": ExpectedTensor((each, words_for(rows, scheme.bits)), WORDS),
        "scales": ExpectedTensor((each, rows), FLOATS),
    }
    if "g_idx" in stored:
        tensors["g_idx"] = ExpectedTensor((columns,), WORDS)
    return StoredLayout((rows, columns), tensors)


def planes(stored: StoredMatrix, scheme: QuantizationScheme, device: torch.device | str) -> Planes:
    rows, columns = layout(stored, scheme).shape
    levels_NK = unpacked(stored.tensor("qweight", device).t(), scheme.bits, columns)
    zeros_GN = unpacked(stored.tensor("qzeros", device), scheme.bits, rows).int()
    if scheme.format == "gptq":
        zeros_GN = zeros_GN + 1 & (1 << scheme.bits) - 1
    scales_NG = stored.scale("scales", device).t().contiguous()
    zeros_NG = zeros_GN.t().float().contiguous()
    g_idx = stored.tensor("g_idx", device) if "g_idx" in stored else None
    return integer_planes(levels_NK, zeros_NG, scales_NG, scheme.bits, scheme.group, g_idx)
