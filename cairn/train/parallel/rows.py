"""A parameter cut by rows: which rows a rank keeps, and what checkpoint tensors they are parts of.

FSDP and ZeRO cut every parameter along its first dimension into equal parts, of which the last may be shorter or empty:

    10 rows over 4 ranks    0..3  3..6  6..9  9..10

A parameter may hold several tensors of a checkpoint (slots), so a part of it holds parts of those. Only numbers and
views.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from cairn.models.build import Slot
from cairn.train.checkpoint.piece import Piece


class Rows(NamedTuple):
    """A half-open range of a parameter's rows."""

    start: int
    stop: int

    def __len__(self) -> int:  # type: ignore[override]
        return self.stop - self.start


def rows_of(total: int, rank: int, size: int) -> Rows:
    """Rows of a rank in torch's partition: equal parts, rounded up."""
    each = -(-total // size)
    return Rows(min(rank * each, total), min((rank + 1) * each, total))


def pieces_of_rows(
    slots: list[Slot], tensors: Mapping[str, Tensor], rows: Mapping[str, Rows]
) -> dict[str, Piece]:
    """`tensors`: by parameter, of which `rows` (all, if there is no entry) are here; empty parts are left out."""
    pieces: dict[str, Piece] = {}
    for slot in slots:
        if slot.parameter not in tensors:
            continue
        local = tensors[slot.parameter].detach()
        span = rows.get(slot.parameter, Rows(0, local.shape[0]))
        piece = _piece(slot, local, span)
        if piece is not None:
            pieces[slot.name] = piece
    return pieces


def _piece(slot: Slot, local: Tensor, rows: Rows) -> Piece | None:
    """The part of a slot within these rows of its parameter."""
    offsets = [0] * len(slot.shape)
    if slot.cut is not None:
        offsets[slot.cut[0]] = slot.cut[1]
    head = slot.index[0] if slot.index else slice(rows.start, rows.stop)
    if isinstance(head, int):  # one matrix of a stack: here, or on another rank
        if not rows.start <= head < rows.stop:
            return None
        return Piece(local[(head - rows.start, *slot.index[1:])], slot.shape, tuple(offsets))
    first = head.start if slot.index else 0  # the slot's own row 0, in rows of the parameter
    start, stop = max(head.start, rows.start), min(head.stop, rows.stop)
    if start >= stop:
        return None
    offsets[0] += start - first
    view = local[(slice(start - rows.start, stop - rows.start), *slot.index[1:])]
    return Piece(view, slot.shape, tuple(offsets))
