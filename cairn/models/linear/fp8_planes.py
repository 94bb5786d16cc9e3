"""Float8 matrices as checkpoints store them, multiplied as `Fp8Rows`: with a scale for each row or for blocks.

Qwen and DeepSeek publish blocks of 128 x 128, and mean activations that are rounded by groups of 128 columns. Here each
token is rounded by its largest value, as with other float8 weights, because the norm before a product does that on its
way; float8 has an exponent of its own, so that a token's small values lose little by it.
"""

import torch
from torch import Tensor

from cairn.kernels.few_rows import TILE_ROWS
from cairn.kernels.matmul.matmul_fp8_blocks import matmul_fp8_blocks
from cairn.kernels.matmul.skinny_fp8 import BLOCK, row_scales
from cairn.kernels.quantize.quantize import Quantized
from cairn.models.linear.fp8_rows import Fp8Rows
from cairn.models.quantized.planes import Planes


class Fp8Planes(Fp8Rows):
    """FP8 weights with one scale for each row or for the tensor."""

    def __init__(self, planes: Planes) -> None:
        rows = planes.shape[0]
        scale_N1: Tensor = planes.scales.repeat_interleave(planes.block_rows, 0)[:rows]
        self.quantized = Quantized(planes.levels_NK.contiguous(), scale_N1.float().contiguous())

    @staticmethod
    def obstacle(planes: Planes) -> str | None:  # pyrefly: ignore[bad-override]
        """Why these planes have no such form, or None."""
        columns = planes.shape[1]
        if planes.kind != "fp8" or planes.shifts is not None or planes.order_K is not None:
            return f"{planes.kind} levels, shifts or another order of columns"
        if planes.group < columns:
            return f"a scale for each {planes.group} of {columns} columns"
        return f"rows of {columns} bytes" if columns % 16 else None


class Fp8Blocks(Fp8Rows):
    """FP8 weights with a scale for each block of 128 x 128."""

    def __init__(self, planes: Planes) -> None:
        scales = planes.scales.float().contiguous()
        self.quantized = Quantized(planes.levels_NK.contiguous(), scales)

    @staticmethod
    def obstacle(planes: Planes) -> str | None:  # pyrefly: ignore[bad-override]
        """Why these planes have no such form, or None."""
        (rows, columns), block = planes.shape, (planes.block_rows, planes.group)
        if planes.kind != "fp8" or planes.shifts is not None or planes.order_K is not None:
            return f"{planes.kind} levels, shifts or another order of columns"
        if block != (BLOCK, BLOCK) or rows % 16 or columns % (4 * BLOCK):
            return f"{rows} x {columns} in blocks of {block[0]} x {block[1]}"
        return None

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        return (self.quantized.values.float() * row_scales(self.quantized)).to(dtype)

    def _streams(self, rows: int) -> bool:
        return rows <= TILE_ROWS  # cuBLAS takes four times as long as in 16 bits for 100 rows

    def _many(self, x: Quantized, invariant: bool) -> Tensor:
        return matmul_fp8_blocks(x, self.quantized)
