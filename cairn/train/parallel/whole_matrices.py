"""Whole matrices out of the parts that ranks hold: for an optimizer whose update is not one of element by element.

    my rows or columns, zeros elsewhere  --sum over the ranks that have the others-->  the matrix, on each of them

A sum with zeros is exact, and needs not know how a matrix was cut. It moves twice the bytes of a gather.
`all_here` is for one process, which has all of every matrix.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cairn.models.build import Slot
from cairn.train.checkpoint.piece import Piece
from cairn.train.parallel.mesh import Group


class Matrix(NamedTuple):
    """A matrix of which this rank or a rank of its groups holds a part."""

    parameter: str  # path of the parameter that holds it
    shape: tuple[int, ...]  # of the whole
    groups: tuple[Group, ...] = ()  # ranks that hold the other parts
    mine: bool = True  # False: another rank has the same part and gives it


Matrices = dict[str, Matrix]  # in the same order on all ranks of a group


def all_here(slots: Sequence[Slot]) -> Matrices:
    return {slot.name: Matrix(slot.parameter, slot.shape) for slot in slots}


def over_ranks(
    slots: Sequence[Slot], tensor: Group, rows: Group, mine: bool, apart: Callable[[str], bool]
) -> Matrices:
    """`tensor`: ranks of tp. `rows`: ranks that have other rows, but for parameters that are `apart`."""
    matrices: Matrices = {}
    for slot in slots:
        by_rows = rows is not None and not apart(slot.parameter)
        groups = (rows,) if by_rows else ()
        groups += (tensor,) if slot.cut is not None and tensor is not None else ()
        matrices[slot.name] = Matrix(slot.parameter, slot.shape, groups, mine or not by_rows)
    return matrices


def put_together(like: Matrix, parts: Sequence[Piece | None], device: torch.device) -> Tensor:
    """[N, R, C] in float32, of matrices of one batch. None: no part of it is here."""
    if not like.groups:
        return torch.stack([part.tensor.float() for part in parts if part is not None])
    whole_NRC = torch.zeros(len(parts), *like.shape, device=device)
    for whole_RC, part in zip(whole_NRC, parts, strict=True):
        if part is not None and like.mine:
            whole_RC[place(part)] = part.tensor
    for group in like.groups:
        dist.all_reduce(whole_NRC, group=group)
    return whole_NRC


def place(part: Piece) -> tuple[slice, ...]:
    """Slices of a part in the whole matrix."""
    sides = zip(part.offsets, part.tensor.shape, strict=True)
    return tuple(slice(offset, offset + size) for offset, size in sides)


def batches(matrices: Mapping[str, Matrix], most: int) -> list[list[str]]:
    """Names whose matrices have a shape and groups in common, at most so many elements at a time."""
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name, matrix in matrices.items():
        key = (matrix.shape, tuple(map(id, matrix.groups)), matrix.mine)
        kinds.setdefault(key, []).append(name)
    grouped = []
    for names in kinds.values():
        each = max(1, most // math.prod(matrices[names[0]].shape))
        grouped += [names[i : i + each] for i in range(0, len(names), each)]
    return grouped
