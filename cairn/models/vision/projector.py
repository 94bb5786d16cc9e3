"""From hidden states of patches, [N, P, D] of tiles of one size, to rows of the decoder, [R, D'].

One class for each kind of `ProjectorSpec`.
"""

from collections.abc import Iterator
from typing import Protocol

import msgspec
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.models.activation import ACTIVATIONS
from cairn.models.build import Build, Holder, Slot
from cairn.models.layers import Norm
from cairn.models.vision.spec import VisionSpec


class HasGrid(Protocol):
    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...


class Map(Holder):
    """One linear map; a tower is small beside its decoder, so it is never packed."""

    def __init__(self, build: Build, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = build.parameter(outputs, inputs)
        self.bias = build.parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def slots(self) -> Iterator[Slot]:
        yield Slot("weight", "weight", tuple(self.weight.shape))
        if self.bias is not None:
            yield Slot("bias", "bias", tuple(self.bias.shape), init="zeros")


class TwoMaps(nn.Module):
    def __init__(self, build: Build, spec: VisionSpec) -> None:
        super().__init__()
        projector = spec.projector
        self.first = Map(build, spec.tower.shape.hidden, projector.hidden, projector.bias)
        self.second = Map(build, projector.hidden, projector.hidden, projector.bias)
        self.activation = ACTIVATIONS[projector.activation]

    def forward(self, x_NPD: Tensor, grid: HasGrid) -> Tensor:
        return self.second(self.activation(self.first(x_NPD.flatten(0, 1))))


class Pooled(nn.Module):
    """Gemma 3: its norm is the decoder's, whose weights are offsets from one."""

    def __init__(self, build: Build, spec: VisionSpec) -> None:
        super().__init__()
        shape = msgspec.structs.replace(spec.tower.shape, norm="rms", norm_plus_one=True)
        self.merge = spec.projector.merge
        self.norm = Norm(build, shape, shape.hidden)
        self.map = Map(build, shape.hidden, spec.projector.hidden, bias=False)

    def forward(self, x_NPD: Tensor, grid: HasGrid) -> Tensor:
        x_NDHW = x_NPD.unflatten(1, (grid.height, grid.width)).permute(0, 3, 1, 2)
        x_RD = F.avg_pool2d(x_NDHW, self.merge).flatten(2).transpose(1, 2).flatten(0, 1)
        return self.map(self.norm(x_RD))


class Shuffled(nn.Module):
    """Idefics 3: neighbours side by side, row by row of the cell."""

    def __init__(self, build: Build, spec: VisionSpec) -> None:
        super().__init__()
        self.merge = spec.projector.merge
        width = spec.tower.shape.hidden * self.merge**2
        self.map = Map(build, width, spec.projector.hidden, spec.projector.bias)

    def forward(self, x_NPD: Tensor, grid: HasGrid) -> Tensor:
        merge = self.merge
        rows, columns = grid.height // merge, grid.width // merge
        cells = x_NPD.reshape(len(x_NPD), rows, merge, columns, merge, x_NPD.shape[-1])
        return self.map(cells.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(0, 2))


class Linear(nn.Module):
    def __init__(self, build: Build, spec: VisionSpec) -> None:
        super().__init__()
        self.map = Map(build, spec.tower.shape.hidden, spec.projector.hidden, spec.projector.bias)

    def forward(self, x_NPD: Tensor, grid: HasGrid) -> Tensor:
        return self.map(x_NPD.flatten(0, 1))


KINDS: dict[str, type[nn.Module]] = {
    "mlp": TwoMaps,
    "pooled": Pooled,
    "shuffled": Shuffled,
    "linear": Linear,
}


def make_projector(build: Build, spec: VisionSpec) -> nn.Module:
    return KINDS[spec.projector.kind](build, spec)
