"""The tensors of one quantised matrix in a file, and what a reader expects of them before it reads any.

A reader is a module with two functions, which the table of `source` lists by format:

    layout(stored, scheme) -> Layout       shape of the matrix, and of each tensor that stores it; headers only
    planes(stored, scheme, device)         the matrix as canonical planes on a device
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.core.errors import WeightsError
from cairn.models.quantized.planes import Planes
from cairn.models.safetensors_file import TensorSource

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WORDS, BYTES, FP8 = (torch.int32,), (torch.uint8,), (torch.float8_e4m3fn,)
ONE: tuple[int, ...] = ()  # a single number, whether stored as [], [1] or [1, 1]


class ExpectedTensor(NamedTuple):
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


class StoredLayout(NamedTuple):
    shape: tuple[int, int]
    tensors: dict[str, ExpectedTensor]  # by the last part of the name


class StoredMatrix:
    """Tensors of a module by the last part of their names: weight_packed, weight_scale, ..."""

    def __init__(self, files: TensorSource, module: str, names: Mapping[str, str]) -> None:
        self.files, self.module, self.names = files, module, names

    def __contains__(self, part: str) -> bool:
        return part in self.names

    def shape(self, part: str) -> tuple[int, ...]:
        return self.files.shape(self._name(part))

    def tensor(self, part: str, device: torch.device | str = "cpu") -> Tensor:
        return self.files.tensor(self._name(part)).to(device)

    def scale(self, part: str, device: torch.device | str = "cpu") -> Tensor:
        """Scales in float32; each has to be a number other than 0."""
        scale = self.tensor(part, device).float()
        bad = ~torch.isfinite(scale) | (scale == 0)
        if bad.any():
            raise WeightsError(
                f"{self._name(part)} has {int(bad.sum())} scales that are 0, NaN or infinite, of {scale.numel()}",
                hint="the checkpoint is damaged or was quantised wrongly: fetch or make it again",
            )
        return scale

    def matrix(self, part: str) -> tuple[int, int]:
        shape = self.shape(part)
        if len(shape) != 2 or 0 in shape:
            raise WeightsError(
                f"{self._name(part)} has shape {list(shape)}, expected a matrix",
                hint="the weights do not belong to this quantization_config",
            )
        return shape[0], shape[1]

    def check(self, layout: StoredLayout) -> None:
        """Refuse what is missing, truncated or of another type, from headers alone."""
        for part, expected in layout.tensors.items():
            name, shape = self._name(part), self.shape(part)
            same = shape in ((), (1,), (1, 1)) if expected.shape == ONE else shape == expected.shape
            if not same:
                raise WeightsError(
                    f"{name} has shape {list(shape)}, expected {list(expected.shape)} for a matrix of "
                    f"{layout.shape[0]} x {layout.shape[1]}",
                    hint="the file is truncated, or its quantization_config names another group size",
                )
            if (dtype := self.files.dtype(name)) not in expected.dtypes:
                raise WeightsError(
                    f"{name} is stored as {dtype}, expected {expected.dtypes[0]}",
                    hint="the weights do not belong to this quantization_config",
                )

    def _name(self, part: str) -> str:
        if part not in self.names:
            raise WeightsError(
                f"{self.module} is quantised and has no {part}; it has {', '.join(sorted(self.names))}",
                hint="the download is incomplete, or quantization_config describes another format",
            )
        return self.names[part]


def groups(columns: int, group: int) -> int:
    """Scales of a row."""
    return -(-columns // group) if group else 1


def integer_planes(
    levels_NK: Tensor,
    zeros_NG: Tensor | int,
    scales_NG: Tensor,
    bits: int,
    group: int,
    g_idx_K: Tensor | None = None,
) -> Planes:
    """w = (level - zero) * scale for unsigned levels of up to 8 bits."""
    columns = levels_NK.shape[1]
    group = group or columns
    order_K = None if g_idx_K is None else column_order(g_idx_K.long(), group)
    if order_K is not None:
        levels_NK = levels_NK[:, order_K]
    if bits <= 4:
        return Planes(
            "int4", levels_NK.contiguous(), scales_NG, -zeros_NG * scales_NG, group, 1, order_K
        )
    middle = 1 << bits - 1
    shifts = (middle - zeros_NG) * scales_NG
    centred_NK = (levels_NK.short() - middle).to(torch.int8)
    return Planes(
        "int8", centred_NK, scales_NG, shifts if shifts.any() else None, group, 1, order_K
    )


def column_order(g_idx_K: Tensor, group: int) -> Tensor | None:
    """The columns sorted by their group; None where they are, or where no order was stored (-1)."""
    plain_K = torch.arange(len(g_idx_K), device=g_idx_K.device) // group
    if torch.equal(g_idx_K, plain_K) or bool((g_idx_K == -1).all()):
        return None
    order_K = torch.argsort(g_idx_K, stable=True)
    if not torch.equal(g_idx_K[order_K], plain_K):
        sizes = torch.bincount(g_idx_K.clamp(min=0)).tolist()
        raise WeightsError(
            f"g_idx puts {min(sizes)} to {max(sizes)} columns into a group of {group}",
            hint="the checkpoint is damaged, or its group_size is another",
        )
    return order_K
