"""Tiles of a matmul's result and their order.

Shared by the persistent products (matmul, matmul_fp8): one program per multiprocessor walks over the tiles of y,
down a group of rows before moving on to the next columns, so that the tiles of b it needs are in the L2 cache. Tiles
of the operands come through TMA, which wants rows that start at multiples of 16 bytes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.arguments import as_rows
from cairn.kernels.few_rows import readable_rows


class Tiles(NamedTuple):
    """The size of a tile, and how many operand tiles are on their way while one is multiplied."""

    block_m: int = 128
    block_n: int = 256  # rows of b; with SwiGLU half of them gate, half up
    block_k: int = 64
    group: int = 8  # tiles of a that share tiles of b
    warps: int = 8
    stages: int = 4
    per_sm: int = 1  # programs that share a multiprocessor, where tiles are small
    flatten: bool = False  # load the next tile's operands during this one's epilogue

    def name(self) -> str:
        size = f"{self.block_m}x{self.block_n}x{self.block_k}"
        flat = ", flattened" if self.flatten else ""
        return f"{size}, {self.warps} warps, {self.stages} stages{flat}"

    def number(self, m: int, n: int) -> int:
        return -(-m // self.block_m) * -(-n // self.block_n)

    def programs(self, m: int, n: int, processors: int) -> int:
        return min(self.number(m, n), self.per_sm * processors)

    def constants(self) -> dict[str, int | bool]:
        return dict(BM=self.block_m, BN=self.block_n, BK=self.block_k, GROUP=self.group)


@triton.jit
def place(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """First row and first column of a tile."""
    per_group = GROUP * tl.cdiv(N, BN)
    first = tile // per_group * GROUP
    size = tl.minimum(tl.cdiv(M, BM) - first, GROUP)
    within = tile % per_group
    return (first + within % size) * BM, within // size * BN


def tma_obstacle(name: str, tensor: Tensor) -> str | None:
    """Why TMA cannot move tiles of this tensor, or None."""
    rows = as_rows(name, tensor)
    if rows.stride(1) != 1 or rows.stride(0) * rows.element_size() % 16 or rows.data_ptr() % 16:
        return f"rows of {name} do not start at multiples of 16 bytes"
    return None


def row_tiles(rows_MK: Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptor of an operand's rows; a tile may extend beyond the last row (`few_rows`)."""
    shape = [readable_rows(rows_MK, block[0]), rows_MK.shape[1]]
    return TensorDescriptor(rows_MK, shape, list(rows_MK.stride()), block)


def aligned_rows(rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised [rows, columns]; rows begin at multiples of 16 bytes, whatever they have."""
    more = -columns % (16 // dtype.itemsize)
    return like.new_empty(rows, columns + more, dtype=dtype)[:, :columns]


def row_bucket(m: int) -> int:
    """Numbers of rows that share a configuration: up to the next power of two, from 16 to 8192."""
    return min(1 << max(m - 1, 15).bit_length(), 8192)
