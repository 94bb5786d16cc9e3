"""A rectangle of a tensor that has a name: what one rank holds of it, and where in the whole it belongs.

    whole  [8, 4]  "layers.0.feed_forward.down.weight"
    piece  tensor [8, 2], offsets (0, 2)              the right half, on one of two tensor-parallel ranks

Everything that is saved is a piece. Because each says where it belongs, a checkpoint can be read by any other layout:
a reader asks for its own rectangles, whichever rank wrote them. Knows no parallelism and no file.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from cairn.models.build import Slot


class Piece(NamedTuple):
    tensor: Tensor  # what this rank holds; loading writes into it
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where in the whole the first element of `tensor` stands


def whole(tensor: Tensor) -> Piece:
    return Piece(tensor, tuple(tensor.shape), (0,) * tensor.dim())


def piece_of(slot: Slot, local: Tensor) -> Piece:
    """The part of a parameter (or of a state of its shape) that a slot names."""
    view = local.detach()[slot.index]
    offsets = [0] * len(slot.shape)
    if slot.cut is not None:
        dimension, start, _ = slot.cut
        offsets[dimension] = start
    return Piece(view, slot.shape, tuple(offsets))


def pieces_of(slots: list[Slot], tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """`tensors`: by the path of a parameter, each of its shape; those without an entry are left out."""
    return {
        slot.name: piece_of(slot, tensors[slot.parameter])
        for slot in slots
        if slot.parameter in tensors
    }
