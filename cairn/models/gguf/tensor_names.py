"""Mapping from GGUF tensors to Hugging Face tensors, with their transformations.

llama.cpp renames tensors, stacks experts and changes some values on the way in. Here is the way
back, by the tables of `family_names`: for each name a `GGUFSource`, one stored tensor or a slice of it and the
change to undo. A tensor that no table knows is an error, because a model without it would compute
something else. This module reads no values.
"""

import re
from collections.abc import Iterator

import msgspec

from cairn.core.errors import UnsupportedModel, WeightsError
from cairn.models.gguf.family_names import NAMINGS, Naming
from cairn.models.gguf.header import GGUFHeader, StoredTensor
from cairn.models.gguf.value_transforms import HeadTiles, ValueTransform


class GGUFSource(msgspec.Struct, frozen=True):
    """Source of a Hugging Face tensor in the GGUF file."""

    stored: StoredTensor
    start: int  # byte in the file
    size_bytes: int
    stored_shape: tuple[int, ...]  # of the slice, before the change is undone
    change: ValueTransform = ValueTransform()
    joined: "GGUFSource | None" = None  # the tensor that holds the rest of it
    key_heads: int = 0  # of a delta net whose parts are joined; 0: parts of latent attention are

    @property
    def shape(self) -> tuple[int, ...]:
        if self.joined is None:
            return self.change.shape(self.stored_shape)
        first, second = self.stored_shape, self.joined.stored_shape
        if self.key_heads:
            return (first[0] + second[0], first[1])
        return (first[0] * (first[2] + second[1]), first[1])

    @property
    def in_rows(self) -> bool:
        """Return whether the quantised rows equal the tensor's rows up to their order."""
        return self.joined is None and self.change.moves_rows_only


_NUMBER = r"(0|[1-9][0-9]{0,4})"
_STORED_NAME = re.compile(
    rf"(?:blk\.{_NUMBER}\.)?([a-z0-9_]+?(?:\.[a-z_]+?)??)(?:\.{_NUMBER})?(?:\.(weight|bias))?"
)


def hf_sources(header: GGUFHeader, config: dict[str, object]) -> dict[str, GGUFSource]:
    """Sources by Hugging Face tensor name, in file order."""
    naming = NAMINGS[str(config["model_type"])]
    sources: dict[str, GGUFSource] = {}
    for stored in header.tensors.values():
        if stored.name in naming.rope_tensors:
            continue
        for name, source in _translate(header, config, naming, stored):
            if name in sources:
                raise WeightsError(
                    f"{header.path} has {name} twice, once as {stored.name!r}",
                    hint="the file is damaged or was converted wrongly",
                )
            sources[name] = source
    return sources


def _translate(
    header: GGUFHeader, config: dict[str, object], naming: Naming, stored: StoredTensor
) -> Iterator[tuple[str, GGUFSource]]:
    match = _STORED_NAME.fullmatch(stored.name)
    layer, stem, expert, kind = match.groups() if match else (None, "", None, "")
    place = "" if layer is None else naming.layer.format(layer)
    names = naming.model if layer is None else naming.block
    alone = layer is None or (kind == "bias" and not naming.expert_biases)
    experts = {} if alone else naming.experts
    full = f"{stem}.{kind}" if kind else stem
    if layer is not None and int(layer) >= _count(config, "num_hidden_layers", "n_layer"):
        if int(layer) >= _layers_in_file(header):
            raise _unknown(header, stored)
    elif layer is not None and expert is None and full in naming.parts:
        yield from _join(header, config, naming, stored, place)
    elif expert is None and stem in names and (kind == "weight" or full in naming.biased_names):
        yield f"{place}{names[stem]}.{kind}", _whole(header, config, naming, stored, stem)
    elif layer is not None and expert is None and full in naming.bare:
        yield place + naming.bare[full], _whole(header, config, naming, stored, stem)
    elif expert is not None and stem in experts:  # as written until early 2024
        _check_expert(header, config, stored, int(expert) + 1)
        yield f"{place}{experts[stem].format(expert)}.weight", _slice(stored, stored.shape, 0, 1)
    elif expert is None and stem.endswith("_exps") and stem.removesuffix("_exps") in experts:
        count = stored.shape[0] if len(stored.shape) == (3 if kind == "weight" else 2) else 0
        _check_expert(header, config, stored, count, exactly=True)
        name = f"{place}{experts[stem.removesuffix('_exps')]}.{kind}"
        for number in range(count):
            yield name.format(number), _slice(stored, stored.shape[1:], number, count)
    else:
        raise _unknown(header, stored)


def _layers_in_file(header: GGUFHeader) -> int:
    """Number of layers in the file, including the trailing MTP layers, which are ignored."""
    return _count(header.metadata, f"{header.metadata['general.architecture']}.block_count")


def _join(
    header: GGUFHeader, config: dict[str, object], naming: Naming, stored: StoredTensor, place: str
) -> Iterator[tuple[str, GGUFSource]]:
    """Two stored tensors that are one on the Hub: the first of them brings the other along."""
    stems, name = naming.joined
    first, second = (f"blk.{stored.name.split('.')[1]}.{stem}" for stem in stems)
    if second == stored.name and first in header.tensors:
        return
    one, other = header.tensors.get(first), header.tensors.get(second)
    key_heads = _key_heads(config) if "linear_num_key_heads" in config else 0
    if one is None or other is None or not _fit(one.shape, other.shape, key_heads):
        shapes = [None if part is None else part.shape for part in (one, other)]
        raise WeightsError(
            f"{header.path} has {first!r} and {second!r} of shapes {shapes}, which are no {name}",
            hint="the file is damaged or was converted wrongly: fetch it again",
        )
    rest = _slice(other, other.shape, 0, 1)
    source = _slice(one, one.shape, 0, 1)
    yield (
        f"{place}{name}.weight",
        msgspec.structs.replace(source, joined=rest, key_heads=key_heads),
    )


def _fit(first: tuple[int, ...], second: tuple[int, ...], key_heads: int) -> bool:
    if not key_heads:  # keys [H, R, C] and values [H, V, R]
        return len(first) == len(second) == 3 and first[:2] == (second[0], second[2])
    if len(first) != 2 or len(second) != 2 or first[1] != second[1] or first[0] <= second[0]:
        return False
    return (first[0] - second[0]) % (2 * key_heads) == 0 and second[0] % key_heads == 0


def _whole(
    header: GGUFHeader, config: dict[str, object], naming: Naming, stored: StoredTensor, stem: str
) -> GGUFSource:
    kind = naming.changes.get(stem, "none")
    heads = 0
    if kind == "rotary_rows":
        heads = _count(config, "num_attention_heads" if stem == "attn_q" else "num_key_value_heads")
    tiles = _tiles(config, naming.tiled[stem]) if stem in naming.tiled else None
    rows, unit = stored.shape[0], 2 * heads
    if tiles is not None:
        rows = stored.shape[-1] if tiles.along == "columns" else rows - tiles.untouched
        unit = tiles.key_heads * tiles.group
    if unit and (rows < unit or rows % unit):
        raise WeightsError(
            f"{header.path} has {stored.name!r} of shape {stored.shape} for {heads or unit} heads",
            hint="its rows belong to heads of one size: the file is damaged, fetch it again",
        )
    change = ValueTransform(kind, heads, tiles)
    return msgspec.structs.replace(_slice(stored, stored.shape, 0, 1), change=change)


def _tiles(config: dict[str, object], part: str) -> HeadTiles | None:
    """Head tiling; None if there are as many key heads as value heads, whose order is then equal."""
    keys, values = _key_heads(config), _count(config, "linear_num_value_heads")
    if keys == values:
        return None
    before = 2 * keys * _count(config, "linear_key_head_dim") if part == "behind_keys" else 0
    return HeadTiles(keys, values // keys, before, "columns" if part == "columns" else "rows")


def _key_heads(config: dict[str, object]) -> int:
    return _count(config, "linear_num_key_heads")


def _slice(stored: StoredTensor, shape: tuple[int, ...], number: int, count: int) -> GGUFSource:
    size_bytes = stored.size_bytes // count
    return GGUFSource(stored, stored.start + number * size_bytes, size_bytes, shape)


def _check_expert(
    header: GGUFHeader,
    config: dict[str, object],
    stored: StoredTensor,
    count: int,
    exactly: bool = False,
) -> None:
    experts = _count(
        config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"
    )
    if count > experts or (exactly and count != experts):
        raise WeightsError(
            f"{header.path} has {stored.name!r} of shape {stored.shape} for {experts} experts",
            hint="the file is damaged or was converted wrongly: fetch it again",
        )


def _unknown(header: GGUFHeader, stored: StoredTensor) -> UnsupportedModel:
    architecture = header.metadata["general.architecture"]
    return UnsupportedModel(
        f"{header.path} has a tensor {stored.name!r} that no {architecture} model has here",
        hint="without it the model would compute something else",
    )


def _count(config: dict[str, object], *keys: str) -> int:
    return next(value for key in keys if isinstance(value := config.get(key), int))
