"""From hidden states of patches, [N, P, D] of tiles of one size, to rows of the decoder, [R, D'].

One class for each kind of `ProjectorSpec`.
"""

from collections.abc import Iterator
from typing import Protocol, cast

from torch import Tensor, nn

from cairn.models.activation import ACTIVATIONS
from cairn.models.build import Build, Slot
from cairn.models.linear.maps import Linear
from cairn.models.vision.spec import VisionSpec


class HasGrid(Protocol):
    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...


class Map(Linear):
    """One linear map of all shards; a tower is small beside its decoder."""

    def __init__(self, build: Build, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = build.parameter(outputs, inputs)
        self.bias = build.parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.product(x))

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


KINDS: dict[str, type[nn.Module]] = {
    "mlp": TwoMaps,
    "shuffled": Shuffled,
}


def make_projector(build: Build, spec: VisionSpec) -> nn.Module:
    return KINDS[spec.projector.kind](build, spec)
