"""Weights as packed blocks, with which a CPU multiplies: those of a GGUF file, or rows of levels of another checkpoint.

    few rows of x    rounded to 16 bits, multiplied with the packed blocks           kernels/cpu/packed_product.py
    many rows        tiles of the weights are dequantised and multiplied in float32, so that x is not rounded

Blocks of a GGUF file stay where it is mapped. There is no copy of them: what a product reads comes from the page cache
of the system, and processes that serve the same file share it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import ON_ARM
from cairn.kernels.cpu.compiled import obstacle as no_kernels
from cairn.kernels.cpu.level_rows import RowsOfMatrix, rounded_rows
from cairn.kernels.cpu.level_rows import obstacle as no_rows
from cairn.kernels.cpu.packed_product import (
    COLUMNS,
    GATES,
    LEVELS,
    Blocks,
    NormWeight,
    PackedMatrix,
    suits_many_rows,
)
from cairn.models.activation import Gate
from cairn.models.linear.form import PLAIN, AnyRows, Epilogue, finished

FLOAT_ROWS = 1024 if ON_ARM else 48  # of x, from which on dequantised tiles are faster
NEVER = (
    1 << 30
)  # rows: with AVX-512 VNNI or AMX, or levels with a scale for 64 values or more on ARM
TILE_VALUES = 1 << 20  # of the weights that are dequantised at once: 4 MB


class BlocksForm(AnyRows):
    """Packed form of one linear map, or of several maps with the same input."""

    def __init__(self, blocks: Sequence[Blocks]) -> None:
        self.matrix = PackedMatrix(blocks)
        long = all(one.kind in LEVELS and one.group > COLUMNS for one in blocks)
        packed = all(suits_many_rows(one.kind) for one in blocks)
        self.float_rows = NEVER if packed or (ON_ARM and long) else FLOAT_ROWS

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Tensor:
        return self.fused(x_MK, bias_N, gate=epilogue.gate)

    def fused(
        self,
        x_MK: Tensor,
        bias_N: Tensor | None = None,
        gate: Gate | None = None,
        norm: NormWeight | None = None,
        onto_MN: Tensor | None = None,
    ) -> Tensor:
        """The product with a norm before it, and a gate or a sum onto the residual behind it."""
        if x_MK.shape[0] < self.float_rows:
            gated = gate is not None and gate.gated and len(set(self.matrix.part_rows)) == 1
            if gate is None or (
                gated and len(self.matrix.blocks) == 2 and gate.activation in GATES
            ):
                name = None if gate is None else gate.activation
                return self.matrix.product(x_MK, bias_N, name, norm, onto_MN)
            y_MN = self.matrix.product(x_MK, bias_N, None, norm)
            return gate.in_place(y_MN)
        y_MN = self.tiled(x_MK if norm is None else _normed(x_MK, norm))
        y_MN = finished(y_MN, bias_N, Epilogue(gate=gate))
        return y_MN if onto_MN is None else onto_MN.add_(y_MN)

    def tiled(self, x_MK: Tensor) -> Tensor:
        """Compute in float32, one tile of dequantised weights at a time."""
        x_MK, columns = x_MK.contiguous(), self.matrix.columns
        y_MN = x_MK.new_empty(len(x_MK), self.matrix.outputs)
        most = max(1, TILE_VALUES // columns)
        room_RK = torch.empty(min(most, max(self.matrix.part_rows)), columns)
        start = 0
        for part, rows in enumerate(self.matrix.part_rows):
            for first in range(0, rows, most):
                count = min(most, rows - first)
                tile_RK = room_RK[:count]
                self.matrix.rows(part, torch.arange(first, first + count), tile_RK)
                # Written into the columns of y directly, a product takes twice as long on ARM.
                y_MN[:, start + first : start + first + count] = x_MK @ tile_RK.t()
            start += rows
        return y_MN

    def rows(self, rows_T: Tensor) -> Tensor:
        """Rows of the first map in float32: the lookup of an embedding."""
        return self.matrix.rows(0, rows_T)

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.outputs, self.matrix.columns

    def __getitem__(self, rows: slice) -> Tensor:
        """Rows of all maps side by side in float32: what another form is made of."""
        first, last, _ = rows.indices(self.matrix.outputs)
        found_RK, start = torch.empty(last - first, self.matrix.columns), 0
        for part, count in enumerate(self.matrix.part_rows):
            low, high = max(first, start), min(last, start + count)
            if low < high:
                wanted_R = torch.arange(low - start, high - start)
                self.matrix.rows(part, wanted_R, found_RK[low - first : high - first])
            start += count
        return found_RK


class RoundedRows(BlocksForm):
    """8-bit levels with a scale for 64 values, made of a matrix in floating point.

    `rows`: of the maps that lie one under another in it; None: one map. `rounded`: makes them.
    """

    def __init__(
        self,
        weight_NK: RowsOfMatrix,
        rows: list[int] | None = None,
        rounded: Callable[[RowsOfMatrix], Blocks] = rounded_rows,
    ) -> None:
        whole = rounded(weight_NK)
        parts = whole.bytes_NB.split(rows or len(whole.bytes_NB))
        super().__init__([whole._replace(bytes_NB=bytes_NB) for bytes_NB in parts])

    @staticmethod
    def obstacle(columns: int) -> str | None:
        """Why rows of so many values have no such form here, or None."""
        return no_kernels() or no_rows(columns, columns)


def _normed(x_MK: Tensor, norm: NormWeight) -> Tensor:
    return torch.nn.functional.rms_norm(x_MK, norm.weight_K.shape, norm.weight_K, norm.struct.eps)
