"""Selection of linear maps that keep the blocks of a GGUF file as weights, and of the tensors left to load.

A map keeps them if all of its matrices are whole, quantised in a type that the CPU's kernels multiply with, and not
split over ranks. Rows that llama.cpp has put in another order are copied into the model's order; all others stay where
the file is mapped. Parameters that were replaced hold no memory.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from cairn.kernels.cpu.compiled import obstacle as no_kernels
from cairn.kernels.cpu.packed_product import Blocks
from cairn.models.checkpoint_names import TensorLocation
from cairn.models.linear.blocks import BlocksForm
from cairn.models.linear.maps import Linear
from cairn.models.transformer import Transformer


@runtime_checkable
class HasBlocks(Protocol):
    def has_blocks(self, name: str) -> bool:
        """Return whether this tensor is a matrix in a block format with a CPU matmul."""
        ...

    def blocks(self, name: str) -> Blocks: ...


class KeptMap(NamedTuple):
    part: Linear
    names: list[str]  # of its tensors in the file, in the order of its owners
    parameters: list[str]  # that are not loaded


def kept_maps(
    model: Transformer, where: Mapping[str, TensorLocation], tensors: HasBlocks
) -> list[KeptMap]:
    """Maps that keep their blocks: float32 models on a CPU without tensor parallelism."""
    if model.build.shards.size > 1 or model.build.dtype != torch.float32 or no_kernels():
        return []
    found = [_kept(path, part, where, tensors) for path, part in _maps(model)]
    return [one for one in found if one is not None]


def give_blocks(
    kept: list[KeptMap], tensors: HasBlocks, progress: Callable[[int], None] = lambda done: None
) -> None:
    """Attach the blocks; biases must be loaded before because a form includes them."""
    for part, names, _ in kept:
        values = sum(weight.nbytes for weight in part.matrices())
        part.take(BlocksForm([tensors.blocks(name) for name in names]))
        part.release()
        progress(values)


def on_cpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cpu"


def _maps(model: Transformer) -> Iterator[tuple[str, Linear]]:
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            yield path, module


def _kept(
    path: str, part: Linear, where: Mapping[str, TensorLocation], tensors: HasBlocks
) -> KeptMap | None:
    slots = [slot.under(path) for slot in part.slots() if slot.name.endswith("weight")]
    places = [where[slot.name] for slot in slots]
    whole = all(place.is_whole for place in places)
    if any(slot.index for slot in slots) or not whole:
        return None
    names = [place.tensor for place in places]
    if not all(tensors.has_blocks(name) for name in names):
        return None
    return KeptMap(part, names, [slot.parameter for slot in slots])
