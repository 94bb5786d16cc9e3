"""Gives the linear maps of a model forms made of a checkpoint's planes, so that weights stay as small as in the file.

Each map's matrices are read onto the device, cut to this rank's share and joined. What has no planes, or whose planes
cannot be cut or transposed, stays with the parameters in floating point: embeddings, and columns in act order that
tensor parallelism splits. Experts are kept by `load_experts`. What was dequantised is said in a note.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from cairn.core.errors import WeightsError
from cairn.core.units import format_bytes
from cairn.models.build import Slot
from cairn.models.checkpoint_names import TensorLocation
from cairn.models.linear.form import LinearForm
from cairn.models.linear.maps import Linear, Vocabulary, linears
from cairn.models.linear.planes_form import FloatForm, SideBySide
from cairn.models.linear.registry import fast_form, form_of_planes
from cairn.models.quantized.planes import Planes, dequantized
from cairn.models.quantized.sharding import check_columns, cut_columns, cut_rows, joined
from cairn.models.quantized.source import HasPlanes
from cairn.models.safetensors_file import TensorSource
from cairn.models.transformer import Transformer

FLOAT_BITS = 16  # of a weight, from which on it is not quantised
Where = Mapping[str, TensorLocation]  # of each slot's tensor


class QuantizedSource(TensorSource, HasPlanes):
    """A checkpoint with planes."""


class Kept(NamedTuple):
    """A linear map whose weights stay quantised."""

    part: Linear
    slots: list[Slot]  # of its matrices


def packed_maps(model: Transformer, where: Where, tensors: QuantizedSource) -> list[Kept]:
    """Maps that stay packed; checks shapes and tensor-parallel cuts from headers alone."""
    paths = {module: path for path, module in model.named_modules()}
    kept = []
    for part in linears(model):
        slots = [slot.under(paths[part]) for slot in part.slots() if slot.name.endswith("weight")]
        looked_up = part is model.embedding
        quantised = any(tensors.planes_shape(where[slot.name].tensor) for slot in slots)
        stays = all(_stays(slot, where[slot.name], tensors) for slot in slots) and _whole(part)
        if quantised and stays and not looked_up:
            kept.append(Kept(part, slots))
    return kept


def give_forms(
    kept: list[Kept],
    where: Where,
    tensors: QuantizedSource,
    device: torch.device | str,
    progress: Callable[[int], None],
) -> str | None:
    """Read the planes of each map onto the device and give it the form that multiplies with them.

    A GPU without a kernel for some kind of planes multiplies with them in floating point, dequantised once: that is
    several times as fast as in each product, and is said in the note.
    """
    floats: list[int] = []
    for part, slots in kept:
        pieces = [_piece(slot, where[slot.name].tensor, tensors, device) for slot in slots]
        dtype = cast(Tensor, part.matrices()[0]).dtype
        form = _form(pieces, dtype, device)
        floats += [form.nbytes] if isinstance(form, FloatForm) else []
        part.take(form)
        for owner in part.owners():
            cast(nn.Parameter, owner.weight).requires_grad_(False)
        progress(sum(_stored_bytes(slot, where[slot.name].tensor, tensors) for slot in slots))
    if not floats:
        return None
    return (
        f"{len(floats)} quantised matrices have no kernel on {device} and are held in floating point, "
        f"{format_bytes(sum(floats), 'binary')}"
    )


def dequantised_note(
    slots: list[Slot], where: Where, tensors: QuantizedSource, itemsize: int
) -> str | None:
    """Describe the slots that are quantised in the file but dequantised at load."""
    others = [s for s in slots if tensors.bits(where[s.name].tensor) < FLOAT_BITS]
    if not others:
        return None
    values = sum(_count(slot) for slot in others)
    return (
        f"{len(others)} quantised matrices are held in floating point, {format_bytes(values * itemsize, 'binary')}, "
        f"such as {where[others[0].name].tensor}"
    )


def _count(slot: Slot) -> int:
    """Values of this rank's share."""
    whole = int(torch.Size(slot.shape).numel())
    if slot.cut is None:
        return whole
    dimension, start, stop = slot.cut
    return whole // slot.shape[dimension] * (stop - start)


def _stored_bytes(slot: Slot, name: str, tensors: TensorSource) -> int:
    return _count(slot) * tensors.dtype(name).itemsize


def _whole(part: Linear) -> bool:
    """Rows of a vocabulary beyond its last token are zero on the last rank: floats have them."""
    return not isinstance(part, Vocabulary) or part.rows * part.shards.size == part.shape[0]


def _stays(slot: Slot, place: TensorLocation, tensors: QuantizedSource) -> bool:
    """Return whether a matrix of the map can stay packed."""
    known = tensors.planes_shape(place.tensor)
    if not place.is_whole:
        return False
    shape = tensors.shape(place.tensor)
    if shape != slot.shape:
        raise WeightsError(
            f"{place.tensor} has shape {list(shape)}, expected {list(slot.shape)}",
            hint="the weights do not belong to this config.json",
        )
    if known is None or slot.cut is None or slot.cut[0] == 0:
        return True
    if known.ordered:
        return False
    check_columns(slot.shape[1], known.group, *slot.cut[1:], place.tensor)
    return True


def _piece(
    slot: Slot, name: str, tensors: QuantizedSource, device: torch.device | str
) -> Planes | Tensor:
    """This rank's share of one matrix."""
    if tensors.planes_shape(name) is None:
        return slot.share(tensors.tensor(name))
    planes = tensors.planes(name, device)
    if slot.cut is None:
        return planes
    cut = cut_rows if slot.cut[0] == 0 else cut_columns
    return cut(planes, *slot.cut[1:])


def _form(
    pieces: list[Planes | Tensor], dtype: torch.dtype, device: torch.device | str
) -> LinearForm:
    forms = [_form_of(run, dtype, device) for run in _runs(pieces)]
    return forms[0] if len(forms) == 1 else SideBySide(forms)


def _form_of(run: Planes | Tensor, dtype: torch.dtype, device: torch.device | str) -> LinearForm:
    if isinstance(run, Tensor):
        return FloatForm(run.to(device=device, dtype=dtype))
    if torch.device(device).type == "cuda" and fast_form(run, device) is None:
        return FloatForm(dequantized(run, dtype))
    return form_of_planes(run, device)


def _runs(pieces: list[Planes | Tensor]) -> Iterator[Planes | Tensor]:
    """Neighbours that have a common form are joined."""
    last = pieces[0]
    for piece in pieces[1:]:
        both = (
            joined((last, piece))
            if isinstance(last, Planes) and isinstance(piece, Planes)
            else None
        )
        if both is None:
            yield last
            last = piece
        else:
            last = both
    yield last
