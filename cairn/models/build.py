"""Construction of a model: its device and dtype, and the checkpoint tensors that its layers need.

No layer reads a file or knows a checkpoint's names: each says through `slots` which tensors it needs and where in its
parameters they go.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from cairn.models.shards import ALONE, Shards


class Slot(NamedTuple):
    """A tensor that a checkpoint must provide, and its destination in the model on this rank."""

    name: str  # the same whatever the layout: "layers.0.attention.qkv.q.weight"
    parameter: str  # path of the parameter that holds it
    shape: tuple[int, ...]  # of the whole tensor
    index: tuple[int | slice, ...] = ()  # which part of the parameter it fills; (): all of it
    cut: tuple[int, int, int] | None = None  # this rank's share: dimension, start, stop; None: all
    init: Literal["normal", "ones", "zeros", "fan_in"] = "normal"

    def under(self, path: str) -> "Slot":
        return self._replace(name=f"{path}.{self.name}", parameter=f"{path}.{self.parameter}")

    def share(self, whole: Tensor) -> Tensor:
        """The part of the whole tensor that belongs to this rank."""
        return whole if self.cut is None else whole.narrow(*self._narrow())

    def _narrow(self) -> tuple[int, int, int]:
        dimension, start, stop = self.cut or (0, 0, 0)
        return dimension, start, stop - start


class SlotModule(nn.Module):
    """A layer that holds tensors of a checkpoint."""

    def slots(self) -> Iterator[Slot]:
        raise NotImplementedError


class ModelBuild(NamedTuple):
    """Construction parameters of a model: device, dtype, tensor-parallel shards, fusion."""

    device: torch.device | str = "meta"
    dtype: torch.dtype = torch.float32
    shards: Shards = ALONE
    fused: bool = False  # maps of one input (q, k, v; gate, up) are one matrix

    def parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=self.dtype))
