"""Which tensor of a GGUF file is which of the Hugging Face checkpoint, and what was done to it?

llama.cpp renames tensors, stacks experts and changes some values on the way in. Here is the way
back, by the tables of `naming`: for each name a `Source`, one stored tensor or a slice of it and the
change to undo. A tensor that no table knows is an error, because a model without it would compute
something else. This module reads no values.
"""

import re
from collections.abc import Iterator

import msgspec

from cairn.core.errors import UnsupportedModel, WeightsError
from cairn.models.gguf.header import Header, StoredTensor
from cairn.models.gguf.naming import NAMINGS, Change, Naming

ROPE_FACTORS = "rope_freqs.weight"  # not a weight: the config says it as rope_scaling


class Source(msgspec.Struct, frozen=True):
    """Where a tensor of the Hugging Face checkpoint comes from."""

    stored: StoredTensor
    start: int  # byte in the file
    size_bytes: int
    stored_shape: tuple[int, ...]  # of the slice, before the change is undone
    change: Change = "none"
    heads: int = 0  # whose rows were interleaved

    @property
    def shape(self) -> tuple[int, ...]:
        if self.change == "one_channel":
            return (self.stored_shape[0], 1, *self.stored_shape[1:])
        return self.stored_shape[::-1] if self.change == "transposed" else self.stored_shape


_NUMBER = r"(0|[1-9][0-9]{0,4})"
_STORED_NAME = re.compile(
    rf"(?:blk\.{_NUMBER}\.)?([a-z_]+(?:\.[a-z_]+)?)(?:\.{_NUMBER})?\.(weight|bias)"
)


def hf_sources(header: Header, config: dict[str, object]) -> dict[str, Source]:
    """By the names that the checkpoint of `config` has on the Hub, in the order of the file."""
    naming = NAMINGS[str(config["model_type"])]
    sources: dict[str, Source] = {}
    for stored in header.tensors.values():
        if stored.name == ROPE_FACTORS:
            continue
        for name, source in _translate(header, config, naming, stored):
            if name in sources:
                raise WeightsError(f"{header.path} has {name} twice, once as {stored.name!r}",
                                   hint="the file is damaged or was converted wrongly")  # fmt: skip
            sources[name] = source
    return sources


def _translate(
    header: Header, config: dict[str, object], naming: Naming, stored: StoredTensor
) -> Iterator[tuple[str, Source]]:
    match = _STORED_NAME.fullmatch(stored.name)
    layer, stem, expert, kind = match.groups() if match else (None, "", None, "")
    place = "" if layer is None else naming.layer.format(layer)
    names = naming.model if layer is None else naming.block
    alone = layer is None or (kind == "bias" and not naming.expert_biases)
    experts = {} if alone else naming.experts
    if layer is not None and int(layer) >= _count(config, "num_hidden_layers", "n_layer"):
        raise _unknown(header, stored)
    if expert is None and stem in names and (kind == "weight" or stem in naming.biased):
        yield f"{place}{names[stem]}.{kind}", _whole(header, config, naming, stored, stem)
    elif layer is not None and expert is None and f"{stem}.{kind}" in naming.bare:
        yield place + naming.bare[f"{stem}.{kind}"], _slice(stored, stored.shape, 0, 1)
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


def _whole(
    header: Header, config: dict[str, object], naming: Naming, stored: StoredTensor, stem: str
) -> Source:
    change = naming.changes.get(stem, "none")
    source = _slice(stored, stored.shape, 0, 1)
    if change != "rotary_rows":
        return msgspec.structs.replace(source, change=change)
    heads = _count(config, "num_attention_heads" if stem == "attn_q" else "num_key_value_heads")
    if stored.shape[0] % (2 * heads):
        raise WeightsError(
            f"{header.path} has {stored.name!r} of shape {stored.shape} for {heads} heads",
            hint="its rows are two halves of each head: the file is damaged, fetch it again",
        )
    return msgspec.structs.replace(source, change=change, heads=heads)


def _slice(stored: StoredTensor, shape: tuple[int, ...], number: int, count: int) -> Source:
    size_bytes = stored.size_bytes // count
    return Source(stored, stored.start + number * size_bytes, size_bytes, shape)


def _check_expert(
    header: Header,
    config: dict[str, object],
    stored: StoredTensor,
    count: int,
    exactly: bool = False,
) -> None:
    experts = _count(config, "num_local_experts", "num_experts", "n_routed_experts")
    if count > experts or (exactly and count != experts):
        raise WeightsError(
            f"{header.path} has {stored.name!r} of shape {stored.shape} for {experts} experts",
            hint="the file is damaged or was converted wrongly: fetch it again",
        )


def _unknown(header: Header, stored: StoredTensor) -> UnsupportedModel:
    architecture = header.metadata["general.architecture"]
    return UnsupportedModel(
        f"{header.path} has a tensor {stored.name!r} that no {architecture} model has here",
        hint="without it the model would compute something else",
    )


def _count(config: dict[str, object], *keys: str) -> int:
    return next(value for key in keys if isinstance(value := config.get(key), int))
