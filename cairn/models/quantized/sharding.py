"""Planes cut for tensor parallelism, and planes of several matrices joined into one.

A cut keeps every number: between rows anywhere, between columns where groups end. Joined matrices share one group size
and one number of rows for a scale: the largest that fits all of them, down to a scale of its own for each row.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cairn.core.errors import ConfigError
from cairn.models.quantized.planes import Planes


def cut_rows(planes: Planes, start: int, stop: int) -> Planes:
    if start == 0 and stop == planes.shape[0]:
        return planes
    block = planes.block_rows
    if start % block or (stop % block and stop != planes.shape[0]):
        planes, block = by_row(planes), 1
    rows = slice(start // block, -(-stop // block))
    return replace(
        planes,
        levels_NK=planes.levels_NK[start:stop].contiguous(),
        scales=planes.scales[rows].contiguous(),
        shifts=None if planes.shifts is None else planes.shifts[rows].contiguous(),
        block_rows=min(block, stop - start),
    )


def cut_columns(planes: Planes, start: int, stop: int) -> Planes:
    """Planes of a range of columns. Columns in activation order cannot be cut; `obstacle` reports that first."""
    columns, group = planes.shape[1], planes.group
    if start == 0 and stop == columns:
        return planes
    if planes.order_K is not None:
        raise ConfigError("columns in act order cannot be cut", hint="dequantise the matrix first")
    check_columns(columns, group, start, stop, "a matrix")
    parts = slice(start // group, -(-stop // group))
    return replace(
        planes,
        levels_NK=planes.levels_NK[:, start:stop].contiguous(),
        scales=planes.scales[:, parts].contiguous(),
        shifts=None if planes.shifts is None else planes.shifts[:, parts].contiguous(),
        group=min(group, stop - start),
    )


def check_columns(columns: int, group: int, start: int, stop: int, name: str) -> None:
    """Refuse a cut inside a group; one scale for the whole row suits every cut."""
    if group >= columns or not (start % group or (stop % group and stop != columns)):
        return
    share, whole = stop - start, columns // group
    fits = [n for n in range(1, columns // share) if columns % group == 0 and whole % n == 0]
    raise ConfigError(
        f"tensor parallel {columns // share} cuts the {columns} columns of {name} into {share}, and groups of {group} "
        "share a scale",
        hint=f"use tensor parallel {max(fits, default=1)}, or a checkpoint with groups of {math.gcd(group, share)}",
    )


def joined(parts: Sequence[Planes]) -> Planes | None:
    """The matrices one under another; None where they have no common form."""
    first = parts[0]
    if len(parts) == 1:
        return first
    same = (first.kind, first.shape[1], first.activations)
    if any((p.kind, p.shape[1], p.activations) != same for p in parts):
        return None
    if any(not _equal(first.order_K, p.order_K) for p in parts):
        return None
    if len({p.group for p in parts}) > 1:
        group = math.gcd(*(p.group for p in parts))
        if any(p.group < p.shape[1] and p.shape[1] % p.group for p in parts):
            return None
        parts = [regrouped(p, group) for p in parts]
    block = parts[0].block_rows
    if any(p.block_rows != block or p.shape[0] % block for p in parts):
        parts = [by_row(p) for p in parts]
    shifted = any(p.shifts is not None for p in parts)
    known = [p.input_scale for p in parts if p.input_scale is not None]
    one_global = len({p.global_scale for p in parts}) == 1
    return replace(
        parts[0],
        levels_NK=_cat([p.levels_NK for p in parts]),
        scales=torch.cat([p.scales for p in parts]),
        shifts=torch.cat([_shifts(p) for p in parts]) if shifted else None,
        input_scale=max(known) if known else None,
        global_scale=first.global_scale if one_global else None,
    )


def by_row(planes: Planes) -> Planes:
    """A scale of its own for each row."""
    rows, block = planes.shape[0], planes.block_rows
    return replace(
        planes,
        scales=planes.scales.repeat_interleave(block, 0)[:rows],
        shifts=None if planes.shifts is None else planes.shifts.repeat_interleave(block, 0)[:rows],
        block_rows=1,
    )


def regrouped(planes: Planes, group: int) -> Planes:
    """Repeat scales for smaller groups, which must divide the existing ones."""
    times = planes.group // group
    return replace(
        planes,
        scales=planes.scales.repeat_interleave(times, 1),
        shifts=None if planes.shifts is None else planes.shifts.repeat_interleave(times, 1),
        group=group,
    )


def rows_in_order(planes: Planes, order_N: Tensor) -> Planes:
    """Row i of the result is row order_N[i]."""
    planes = by_row(planes)
    return replace(
        planes,
        levels_NK=_cat([planes.levels_NK], order_N),
        scales=planes.scales[order_N],
        shifts=None if planes.shifts is None else planes.shifts[order_N],
    )


def _cat(levels: Sequence[Tensor], order_N: Tensor | None = None) -> Tensor:
    """float8 has neither `cat` nor indexing everywhere: its bytes have."""
    dtype = levels[0].dtype
    whole = torch.cat([part.view(torch.uint8) for part in levels])
    return (whole if order_N is None else whole[order_N]).view(dtype)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _shifts(planes: Planes) -> Tensor:
    return torch.zeros_like(planes.scales) if planes.shifts is None else planes.shifts
