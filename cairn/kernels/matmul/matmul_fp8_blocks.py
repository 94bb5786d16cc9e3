"""y = x @ w.T for many rows, with float8 weights that have a scale for each block of 128 x 128: cuBLAS's product.

    x [M, K] float8 with a scale for each row, w [N, K] float8 with one for each block, y [M, N] bfloat16

cuBLAS takes scales of x for groups of 128 columns; here all groups of a row have that of the row. It adds up to 128
products in the tensor cores and the rest in float32. Few rows are multiplied by `skinny_fp8`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.quantize.quantize import Quantized

ALIGNED_ROWS = 4  # of x: scales of its groups begin at multiples of 16 bytes


def matmul_fp8_blocks(x: Quantized, w: Quantized) -> Tensor:
    rows = len(x.values)
    values, scale_M = x.values, x.scale.reshape(rows)
    if more := -rows % ALIGNED_ROWS:
        values = F.pad(values.view(torch.uint8), (0, 0, 0, more)).view(values.dtype)
        scale_M = F.pad(scale_M, (0, more))
    y_MN = torch._scaled_mm(
        values,
        w.values.T,
        scale_a=scale_M.expand(w.scale.shape[1], -1).contiguous().T,
        scale_b=w.scale.T,
        out_dtype=torch.bfloat16,
    )
    return y_MN[:rows]
