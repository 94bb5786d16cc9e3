"""Planes by the names of slots as planes by the names of a checkpoint's tensors: what a writer writes.

A checkpoint may join q, k and v in one tensor, and may order the rows of a head for its own rotation; both are undone
here, as `export` does it for floats. Scales move with their rows. A scale that a block of rows shares can be kept where
whole heads lie inside a block, and whole blocks inside a part: `check_shared_rows` refuses others before any rounding.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from cairn.core.errors import UnsupportedModel
from cairn.models.build import Slot
from cairn.models.checkpoint_names import TensorLocation, sources
from cairn.models.quantized.planes import Planes
from cairn.models.quantized.sharding import joined, rows_in_order
from cairn.models.transformer import Transformer


def stored_planes(model: Transformer, planes: Mapping[str, Planes]) -> dict[str, Planes]:
    """Planes by the name of the tensor that stores them."""
    parts: dict[str, list[Planes]] = {}
    for slot, place in _places(model, planes):
        parts.setdefault(place.tensor, []).append(_as_stored(planes[slot.name], place.order))
    return {tensor: _joined(found) for tensor, found in parts.items()}


def check_shared_rows(model: Transformer, slots: Container[str], block_rows: int) -> None:
    """Refuses a scale for so many rows where a checkpoint has rows of these slots in another order, or joins them."""
    for slot, place in _places(model, slots):
        rows = slot.shape[0]
        if block_rows > 1 and place.order and block_rows % len(place.order):
            why = f"heads of {len(place.order)} rows are ordered otherwise there"
        elif place.parts > 1 and rows % block_rows:
            why = f"it joins matrices, one of {rows} rows"
        else:
            continue
        raise UnsupportedModel(
            f"{place.tensor} cannot have a scale for {block_rows} rows: {why}",
            hint="use a scheme with a scale for each row, such as --scheme fp8",
        )


def _places(model: Transformer, slots: Container[str]) -> Iterator[tuple[Slot, TensorLocation]]:
    """Parts of one tensor come in the order in which it has them."""
    found = {slot.name: slot for slot in model.slots()}
    where = sources(model.spec, {name: slot.shape for name, slot in found.items()})
    yield from ((found[name], place) for name, place in where.items() if name in slots)


def _as_stored(planes: Planes, order: Sequence[int]) -> Planes:
    """`order`: which stored row of a head is our row i."""
    if not order:
        return planes
    rows = torch.arange(planes.shape[0], device=planes.levels_NK.device)
    order_N = rows.view(-1, len(order))[:, torch.tensor(order).argsort()].flatten()
    if planes.block_rows == 1:
        return rows_in_order(planes, order_N)
    levels_NK = planes.levels_NK  # float8 has no indexing everywhere: its bytes have
    moved_NK = levels_NK.view(torch.uint8)[order_N].view(levels_NK.dtype)
    return replace(planes, levels_NK=moved_NK)


def _joined(parts: list[Planes]) -> Planes:
    made = joined(parts)
    assert made is not None  # all have one grid
    return made
