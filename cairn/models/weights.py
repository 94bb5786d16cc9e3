"""Fills an empty model: from a checkpoint, or with random numbers.

A model is built on the meta device, so it costs nothing; then each parameter is made once, in its final type on
its final device, from the tensors that belong in it. On a CPU, a tensor that already has the right type and fills
its parameter alone is not copied: the parameter is a view of the mapped file, and its pages are read when they are
first used. Names are translated by `checkpoint_names`; files are opened by the source.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from cairn.core.errors import WeightsError
from cairn.models.build import ModelBuild, Slot
from cairn.models.checkpoint_names import TensorLocation, is_left_out, sources
from cairn.models.device_copies import DeviceCopies
from cairn.models.expert_ranks import RankExperts
from cairn.models.gguf.kept_blocks import HasBlocks, KeptMap, give_blocks, kept_maps, on_cpu
from cairn.models.quantized.load import (
    Kept,
    QuantizedSource,
    dequantised_note,
    give_forms,
    packed_maps,
)
from cairn.models.quantized.load_experts import (
    KeptExperts,
    give_expert_forms,
    packed_experts,
)
from cairn.models.quantized.source import HasPlanes
from cairn.models.safetensors_file import TensorSource
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer

TIED_HEAD = "lm_head.weight"
Progress = Callable[[int], None]  # called with the bytes of each tensor that is in place


def load_model(
    spec: ModelSpec,
    tensors: TensorSource,
    build: ModelBuild,
    progress: Progress = lambda done: None,
    notes: list[str] | None = None,
) -> Transformer:
    """A model with a checkpoint's weights; `build` says where, in which type and in which layout.

    `notes`: quantised matrices stay as they are stored, and what does not is said there. None: all are dequantised.
    """
    model = Transformer(spec, build._replace(device="meta"))
    load(model, tensors, build.device, progress, notes)
    return model


def random_model(spec: ModelSpec, build: ModelBuild, seed: int = 0) -> Transformer:
    """A model with random weights that depend on seed, name and kind of device, never on the layout."""
    model = Transformer(spec, build._replace(device="meta"))
    fill_random(model, model.slots(), build.device, seed)
    return model


def fill_random(
    model: nn.Module, slots: Iterable[Slot], device: torch.device | str, seed: int
) -> None:
    """Fill these slots of a model, or of a part of one, on the meta device."""
    modules = dict(model.named_modules())
    for path, group in _by_parameter(slots).items():
        values = [(slot, _drawn_share(slot, seed, device)) for slot in group]
        _place(modules, path, values, device)


def load(
    model: Transformer,
    tensors: TensorSource,
    device: torch.device | str,
    progress: Progress = lambda done: None,
    notes: list[str] | None = None,
) -> None:
    """Fill every parameter of a model on the meta device, or give its linear maps forms; see `load_model`."""
    slots = list(model.slots())
    where = _locate(model.spec, [*slots, *_elsewhere(model)], tensors)
    _check_tied_head(model.spec, where, tensors)
    kept: list[Kept] = []
    experts: list[KeptExperts] = []
    blocks: list[KeptMap] = []
    if notes is not None and isinstance(tensors, HasBlocks) and on_cpu(device):
        blocks = kept_maps(model, where, tensors)
    elif notes is not None and isinstance(tensors, HasPlanes):
        source = cast(QuantizedSource, tensors)
        kept = packed_maps(model, where, source)
        experts = packed_experts(model, where, source, device)
        loaded = {slot.name for part in (*kept, *experts) for slot in part.slots}
        others = [slot for slot in slots if slot.name not in loaded]
        note = dequantised_note(others, where, source, model.build.dtype.itemsize)
        notes += [note] if note else []
    packed = {slot.parameter for part in (*kept, *experts) for slot in part.slots}
    packed |= {parameter for one in blocks for parameter in one.parameters}
    modules = dict(model.named_modules())
    with DeviceCopies(device) as copies:
        for path, group in _by_parameter(slots).items():
            if path in packed:
                continue
            values = [
                (slot, slot.share(read_source(slot, where[slot.name], tensors))) for slot in group
            ]
            _place(modules, path, values, device, copies.submit)
            progress(sum(value.nbytes for _, value in values))
    # Behind the biases, which a form takes along.
    if kept and notes is not None:
        note = give_forms(kept, where, cast(QuantizedSource, tensors), device, progress)
        notes += [note] if note else []
    if experts:
        give_expert_forms(experts, where, cast(QuantizedSource, tensors), device, progress)
    if blocks:
        give_blocks(blocks, cast(HasBlocks, tensors), progress)


def _elsewhere(model: Transformer) -> list[Slot]:
    """Slots that only other ranks hold."""
    layers = [(p, m) for p, m in model.named_modules() if isinstance(m, RankExperts)]
    return [slot.under(path) for path, layer in layers for slot in layer.slots_elsewhere()]


class HasSlots(Protocol):
    """A model that says which tensors it needs."""

    def slots(self) -> Iterator[Slot]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...


def fill_shares(model: HasSlots, shares: Mapping[str, Tensor], device: torch.device | str) -> None:
    """Fill every parameter of a model on the meta device; `shares`: by the name of its slot, this rank's part."""
    modules = dict(model.named_modules())
    for path, group in _by_parameter(model.slots()).items():
        _place(modules, path, [(slot, shares[slot.name]) for slot in group], device)


# -- finding ------------------------------------------------------------------------------------


def _locate(spec: ModelSpec, slots: list[Slot], tensors: TensorSource) -> dict[str, TensorLocation]:
    """Source tensor of each slot; missing or unexpected tensors raise."""
    present = set(tensors.names())
    where = sources(spec, {slot.name: slot.shape for slot in slots})
    prefix = where["norm.weight"].tensor.split(".")[0] + "."
    if not any(name.startswith(prefix) for name in present):  # saved without its language head
        bare = {name: s.tensor.removeprefix(prefix) for name, s in where.items()}
        where = {name: s._replace(tensor=bare[name]) for name, s in where.items()}
    needed = {s.tensor for s in where.values()}
    if missing := sorted(needed - present):
        raise WeightsError(
            f"{len(missing)} of {len(needed)} tensors are missing, such as {_some(missing)}",
            hint="the weights do not belong to this config.json, or the download is incomplete",
        )
    tied_head = {TIED_HEAD} if spec.tied else set()
    extra = {name for name in present - needed - tied_head if not is_left_out(spec, name)}
    if extra:
        raise WeightsError(
            f"{len(extra)} tensors have no place in a {spec.family} model of {spec.layers} layers, "
            f"such as {_some(sorted(extra))}",
            hint="the config.json does not describe these weights",
        )
    return where


def _check_tied_head(
    spec: ModelSpec, where: dict[str, TensorLocation], tensors: TensorSource
) -> None:
    """A checkpoint may repeat the embedding as its head; the reference believes a head that differs."""
    if not spec.tied or TIED_HEAD not in tensors.names():
        return
    embedding = where["embedding.weight"].tensor
    if not torch.equal(tensors.tensor(TIED_HEAD), tensors.tensor(embedding)):
        raise WeightsError(
            f"{TIED_HEAD} differs from {embedding}, but config.json ties them",
            hint="set tie_word_embeddings to false in config.json",
        )


def _some(names: list[str]) -> str:
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:3])


def read_source(slot: Slot, place: TensorLocation, tensors: TensorSource) -> Tensor:
    """The whole tensor of a slot, transposed, cut and ordered as our layers want it."""
    tensor = tensors.tensor(place.tensor)
    stored = tuple(tensor.shape)
    rows, *rest = slot.shape
    expected = (place.rows or rows, *rest)
    expected = expected[::-1] if place.transposed else expected
    if place.leading and stored == (1, *expected):
        tensor, stored = tensor[0], expected
    if place.more_rows and stored[0] > rows and list(stored[1:]) == rest:
        tensor, stored = tensor[:rows], expected
    if stored != expected:
        raise WeightsError(
            f"{place.tensor} has shape {list(stored)}, expected {list(expected)}",
            hint="the weights do not belong to this config.json",
        )
    if not tensor.is_floating_point():
        raise WeightsError(
            f"{place.tensor} is stored as {tensor.dtype}, expected floating point",
            hint="config.json has no quantization_config that says what it means",
        )
    tensor = tensor.t() if place.transposed else tensor
    if place.parts > 1:
        by_head = tensor.unflatten(0, (place.groups, -1))
        tensor = by_head.narrow(1, place.start, rows // place.groups).flatten(0, 1)
    return _reordered(tensor, place.order) if place.order else tensor


def _reordered(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The rows of every head in another order."""
    return tensor.unflatten(0, (-1, len(order)))[:, list(order)].flatten(0, 1)


# -- placing ------------------------------------------------------------------------------------


def _by_parameter(slots: Iterable[Slot]) -> dict[str, list[Slot]]:
    groups: dict[str, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(slot.parameter, []).append(slot)
    return groups


def _place(
    modules: dict[str, nn.Module],
    path: str,
    values: list[tuple[Slot, Tensor]],
    device: torch.device | str,
    copy: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> None:
    """Make the parameter at `path` real; `copy`: a value into its place."""
    owner_path, _, name = path.rpartition(".")
    owner = modules[owner_path]
    blank = getattr(owner, name)
    slot, value = values[0]
    if _fits_as_it_is(blank, values, torch.device(device)):
        filled = value
    else:
        covered = sum(value.numel() for _, value in values)
        make = torch.empty if covered == blank.numel() else torch.zeros  # padding is zero
        filled = make(blank.shape, dtype=blank.dtype, device=device)
        for slot, value in values:
            copy(filled[slot.index], value)
    owner.register_parameter(name, nn.Parameter(filled, requires_grad=blank.requires_grad))


def _fits_as_it_is(blank: Tensor, values: list[tuple[Slot, Tensor]], device: torch.device) -> bool:
    slot, value = values[0]
    same = value.dtype == blank.dtype and value.shape == blank.shape
    return same and not slot.index and value.device == device


def _drawn_share(slot: Slot, seed: int, device: torch.device | str) -> Tensor:
    """Random values of a slot; a sharded one is copied because a view would keep the whole tensor."""
    drawn = _draw(slot, seed, device)
    return (
        drawn
        if slot.cut is None
        else slot.share(drawn).clone(memory_format=torch.contiguous_format)
    )


def _draw(slot: Slot, seed: int, device: torch.device | str) -> Tensor:
    """A whole tensor from a generator that is seeded by its name alone."""
    if slot.init in ("ones", "zeros"):
        make = torch.ones if slot.init == "ones" else torch.zeros
        return make(slot.shape, device=device)
    digest = hashlib.blake2b(f"{seed}:{slot.name}".encode(), digest_size=7).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
    blank = torch.empty(slot.shape, device=device)
    if slot.init == "fan_in":  # kaiming_uniform of a = sqrt(5)
        bound = slot.shape[-1] ** -0.5
        return blank.uniform_(-bound, bound, generator=generator)
    return blank.normal_(0.0, 0.02, generator=generator)
