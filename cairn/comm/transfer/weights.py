"""Weights as shards: how trainers and servers cut tensors, so that a plan can turn one cutting into another.

    FSDP      rows, ceil(rows / n) each              rows_of(shape, rank, n)
    tensor    one axis, evenly, or none              share_of(shape, axis, rank, n)
    ZeRO      a stretch of all elements in a row     shard.flat_boxes(shape, start, stop)
    a file    whole tensors at byte offsets          stored(name, shape, itemsize, rank, region, offset)

`pack` lays a rank's rectangles one behind the other in one region. The same `make_plan` then serves a checkpoint that
is read by another layout (the file is a rank that holds everything) and fresh weights from a trainer to a server.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cairn.comm.transfer.shard import Box, TensorShard, packed, volume, whole_box
from cairn.core.errors import ConfigError

REGION = "weights"
ALIGNMENT = 256  # bytes: what GPU kernels like an address to be a multiple of


class HeldTensor(NamedTuple):
    """A rectangle of a named tensor."""

    tensor: str
    itemsize: int
    box: Box


class PackedWeightShards(NamedTuple):
    shards: list[TensorShard]
    nbytes: int  # that the region has to hold
    dtype: str = ""  # name of the number type, where both sides have to agree on it


def pack(rank: int, held: Iterable[HeldTensor], region: str = REGION) -> PackedWeightShards:
    """Pack tensors consecutively in the given order, each at an aligned address."""
    shards, end = [], 0
    for tensor, itemsize, box in held:
        if volume(box):
            shards.append(packed(tensor, rank, region, end, itemsize, box))
            end += -(-shards[-1].nbytes // ALIGNMENT) * ALIGNMENT
    return PackedWeightShards(shards, end)


def stored(
    tensor: str, shape: Sequence[int], itemsize: int, rank: int, region: str, offset: int
) -> TensorShard:
    """A whole tensor at a byte offset, as a safetensors file has it."""
    return packed(tensor, rank, region, offset, itemsize, whole_box(shape))


def rows_of(shape: Sequence[int], rank: int, ranks: int) -> Box:
    """The rows that FSDP leaves on a rank; the last ones may have fewer, or none."""
    each = -(-shape[0] // ranks)
    start = min(shape[0], rank * each)
    return ((start, min(shape[0], start + each)), *whole_box(shape[1:]))


def share_of(shape: Sequence[int], axis: int | None, rank: int, ranks: int) -> Box:
    """A tensor parallel rank's part; without an axis every rank holds the whole."""
    box = list(whole_box(shape))
    if axis is None:
        return tuple(box)
    if shape[axis] % ranks:
        raise ConfigError(
            f"tensor parallel {ranks} does not divide axis {axis} of {tuple(shape)}",
            hint="cut another axis, or hold the tensor whole",
        )
    each = shape[axis] // ranks
    box[axis] = (rank * each, (rank + 1) * each)
    return tuple(box)


def cut_of(shape: Sequence[int], cut: tuple[int, int, int] | None) -> Box:
    """The rectangle that a model's slot names: (axis, start, stop), or None for all of it."""
    box = list(whole_box(shape))
    if cut is not None:
        axis, start, stop = cut
        box[axis] = (start, stop)
    return tuple(box)
