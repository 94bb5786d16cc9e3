"""Shards: the part of a tensor that a rank holds, and the byte offset of each element.

    address(i, j, k) = base + axis0.offsets[i] + axis1.offsets[j] + axis2.offsets[k]

An axis is a range of the whole tensor's indices with a byte offset for each. That is enough for a strided slice, and
for pages too: the offset of token t is table[t // page_size] * page + t % page_size * token. Knows no model, no
network and no memory; two shards of the same tensor are all that a plan needs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]
Box = tuple[tuple[int, int], ...]  # of each axis: first index, and the one behind the last


class Axis(NamedTuple):
    start: int  # the whole tensor's index of offsets[0]
    offsets: Offsets  # in bytes

    @property
    def stop(self) -> int:
        return self.start + len(self.offsets)

    def between(self, start: int, stop: int) -> Offsets:
        return self.offsets[start - self.start : stop - self.start]


class TensorShard(NamedTuple):
    tensor: str
    rank: int
    region: str  # which of the rank's pieces of memory
    base: int  # byte in the region that all offsets start from
    itemsize: int
    axes: tuple[Axis, ...]

    @property
    def box(self) -> Box:
        return tuple((axis.start, axis.stop) for axis in self.axes)

    @property
    def elements(self) -> int:
        return math.prod(len(axis.offsets) for axis in self.axes)

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


def even_axis(start: int, stop: int, step_bytes: int) -> Axis:
    """Indices that lie one behind the other, `step_bytes` apart."""
    return Axis(start, np.arange(stop - start, dtype=np.int64) * step_bytes)


def packed(tensor: str, rank: int, region: str, base: int, itemsize: int, box: Box) -> TensorShard:
    """A rectangle of a tensor that lies in memory row by row, without gaps."""
    steps = packed_steps([stop - start for start, stop in box], itemsize)
    axes = (even_axis(start, stop, step) for (start, stop), step in zip(box, steps, strict=True))
    return TensorShard(tensor, rank, region, base, itemsize, tuple(axes))


def packed_steps(extents: Sequence[int], itemsize: int) -> list[int]:
    """Bytes from one index to the next, of each axis."""
    return [itemsize * math.prod(extents[axis + 1 :]) for axis in range(len(extents))]


def overlap(left: Box, right: Box) -> Box | None:
    """The intersection of two boxes, or None if it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return both if all(start < stop for start, stop in both) else None


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements start..stop of a tensor laid out in a row (how ZeRO cuts), as few rectangles as it takes."""
    if not shape:
        return [()] if start < stop else []
    return _flat_boxes(tuple(shape), start, min(stop, math.prod(shape)))


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start, stop),)]
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # rows that are wanted whole: first..last
    if first > last:  # it begins and ends within one row
        return _in_row(last, _flat_boxes(shape[1:], start - last * inner, stop - last * inner))
    boxes: list[Box] = []
    if start < first * inner:
        boxes += _in_row(first - 1, _flat_boxes(shape[1:], start - (first - 1) * inner, inner))
    if first < last:
        boxes.append(((first, last), *whole_box(shape[1:])))
    return boxes + _in_row(last, _flat_boxes(shape[1:], 0, stop - last * inner))


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [((row, row + 1), *box) for box in boxes]
