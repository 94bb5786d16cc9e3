"""A model's tensors as shards of `comm.transfer`: what a rank of a trainer holds, and what a rank of a server wants.

Both sides build the layout from the spec, so they agree without telling each other. Tensors go by the names of the
model's slots and have the type that the server computes in.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from cairn.comm.transfer.copies import Bytes
from cairn.comm.transfer.weights import HeldTensor, PackedWeightShards, cut_of, pack, rows_of
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer


def held_by_rows(spec: ModelSpec, dtype: torch.dtype, rank: int, ranks: int) -> PackedWeightShards:
    """Each rank has the rows that FSDP leaves it; one rank has everything."""
    slots = Transformer(spec).slots()
    shards = (
        HeldTensor(slot.name, dtype.itemsize, rows_of(slot.shape, rank, ranks)) for slot in slots
    )
    return pack(rank, shards)._replace(dtype=str(dtype).removeprefix("torch."))


def wanted_by(model: Transformer) -> PackedWeightShards:
    """Shards of the model that this rank holds."""
    size = model.embedding.weight.itemsize
    slots = model.slots()
    shards = (HeldTensor(slot.name, size, cut_of(slot.shape, slot.cut)) for slot in slots)
    return pack(model.build.shards.rank, shards)


def write_shards(memory: Bytes, packed: PackedWeightShards, model: Transformer) -> None:
    """Put what a rank holds into its memory, from a model that has all of it."""
    slots = {slot.name: slot for slot in model.slots()}
    views = _views(memory, packed, model.embedding.weight.dtype)
    for shard, (name, part) in zip(packed.shards, views, strict=True):
        whole = model.get_parameter(slots[name].parameter).detach()[slots[name].index]
        part.copy_(whole[tuple(slice(*ends) for ends in shard.box)])


def read_shares(memory: Bytes, packed: PackedWeightShards, dtype: torch.dtype) -> dict[str, Tensor]:
    """Views of the tensors in the memory of a rank, by slot name."""
    return dict(_views(memory, packed, dtype))


def _views(
    memory: Bytes, packed: PackedWeightShards, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for shard in packed.shards:
        shape = [stop - start for start, stop in shard.box]
        part = memory[shard.base : shard.base + shard.nbytes]
        yield shard.tensor, torch.from_numpy(part).view(dtype).view(shape)
