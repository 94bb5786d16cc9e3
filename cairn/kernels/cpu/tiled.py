"""Matrices in the order in which the compiled products of an encoder read them: `float_tiles.h`, `half_tiles.h`."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import library, obstacle
from cairn.kernels.cpu.packed_product import pool


class Affine(NamedTuple):
    """A matrix [N, K] and its bias [N], or the weight and the bias of a norm."""

    weight: Tensor
    bias: Tensor


class Weights(ctypes.Structure):
    """`TiledWeights` of `float_tiles.h`."""

    _fields_ = (
        ("tiles", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("depth", ctypes.c_int32), ("columns", ctypes.c_int32),
    )  # fmt: skip


@lru_cache(maxsize=8)
def side_of(dtype: torch.dtype) -> int:
    """Columns of a matrix of this type that lie together; 0: this CPU has no kernels for it."""
    if dtype not in (torch.float32, torch.float16) or obstacle() is not None:
        return 0
    core = library()
    if not hasattr(core, "cairn_tile_side"):
        return 0
    return core.cairn_tile_side(dtype == torch.float16)


def has_tiles(dtype: torch.dtype, sizes: Sequence[int]) -> bool:
    """Return whether there are kernels for layers of these widths and this weight dtype."""
    side = side_of(dtype)
    return side > 0 and not any(size % side for size in sizes)


class Held:
    """Structures that point to tensors, and the tensors."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def address(self, tensor: Tensor) -> int:
        held = tensor.detach().contiguous()
        self._tensors.append(held)
        return held.data_ptr()

    def weights(self, weight_NK: Tensor, bias_N: Tensor | None) -> Weights:
        """A copy in tiles; columns that are missing in the last one are zero."""
        (columns, depth), side = weight_NK.shape, side_of(weight_NK.dtype)
        if columns % side:
            blank = weight_NK.new_zeros(-columns % side, depth)
            weight_NK = torch.cat([weight_NK, blank])
        tiles = weight_NK.unflatten(0, (-1, side)).transpose(1, 2)
        bias = None if bias_N is None else self.address(bias_N.float())
        return Weights(self.address(tiles), bias, depth, weight_NK.shape[0])

    def norm(self, given: Affine) -> tuple[int, int]:
        return self.address(given.weight.float()), self.address(given.bias.float())


class TiledMap:
    """y = x @ weight.T + bias, or its GELU, by all threads; x and y in float32."""

    def __init__(self, given: Affine) -> None:
        self._held = Held()
        self._weights = self._held.weights(*given)
        self._is_half = given.weight.dtype == torch.float16
        self._run = library().cairn_affine

    @property
    def nbytes(self) -> int:
        return self._held.nbytes

    def __call__(self, x: Tensor, rows: int, stride: int, gelu: bool = False) -> Tensor:
        """[rows, N]; row i of x begins `stride` numbers behind the one before it, whether they overlap or not."""
        depth = self._weights.depth
        if x.dtype != torch.float32 or (rows - 1) * stride + depth > x.numel():
            raise ValueError(
                f"{rows} rows of {depth} numbers in float32 are not in {x.shape} {x.dtype}"
            )
        x = x.contiguous()
        y = torch.empty(rows, self._weights.columns)
        failed = self._run(
            *(pool().address, ctypes.byref(self._weights), self._is_half),
            *(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(stride), rows, gelu),
            ctypes.c_void_p(y.data_ptr()),
        )
        if failed:
            raise MemoryError(f"no memory for a product of {rows} rows of {depth} numbers")
        return y
