"""Projectors from hidden states of patches [N, P, D] (tiles of one size) to rows of the decoder [R, D'].

One class for each kind of `ProjectorSpec`.
"""

from collections.abc import Iterator
from typing import Any, Protocol, cast

import msgspec
from torch import Tensor, nn

from cairn.models.activation import ACTIVATIONS
from cairn.models.build import ModelBuild, Slot
from cairn.models.layers import Norm
from cairn.models.linear.maps import Linear
from cairn.models.vision.spec import VisionSpec


class HasGrid(Protocol):
    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...


class ReplicatedLinear(Linear):
    """Linear map that is replicated on all shards, because the encoder is small."""

    def __init__(self, build: ModelBuild, inputs: int, outputs: int, bias: bool) -> None:
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
    def __init__(self, build: ModelBuild, spec: VisionSpec) -> None:
        super().__init__()
        projector = spec.projector
        self.first = ReplicatedLinear(
            build, spec.tower.shape.hidden, projector.hidden, projector.bias
        )
        self.second = ReplicatedLinear(build, projector.hidden, projector.hidden, projector.bias)
        self.activation = ACTIVATIONS[projector.activation]

    def forward(self, x_NPD: Tensor, grid: HasGrid) -> Tensor:
        return self.second(self.activation(self.first(x_NPD.flatten(0, 1))))


class Shuffled(nn.Module):
    """Idefics 3: neighbours side by side, row by row of the cell."""

    def __init__(self, build: ModelBuild, spec: VisionSpec) -> None:
        super().__init__()
        self.merge = spec.projector.merge
        width = spec.tower.shape.hidden * self.merge**2
        self.map = ReplicatedLinear(build, width, spec.projector.hidden, spec.projector.bias)

    def forward(self, x_NPD: Tensor, grid: HasGrid) -> Tensor:
        return self.map(cells_of(x_NPD, grid, self.merge).flatten(1))


class OneMap(nn.Module):
    """PaliGemma."""

    def __init__(self, build: ModelBuild, spec: VisionSpec) -> None:
        super().__init__()
        self.map = ReplicatedLinear(
            build, spec.tower.shape.hidden, spec.projector.hidden, spec.projector.bias
        )

    def forward(self, x_NPD: Tensor, grid: HasGrid) -> Tensor:
        return self.map(x_NPD.flatten(0, 1))


class Pooled(nn.Module):
    """Gemma 3: the mean of a cell of patches, normed by weights that are offsets from one."""

    def __init__(self, build: ModelBuild, spec: VisionSpec) -> None:
        super().__init__()
        self.merge, shape = spec.projector.merge, spec.tower.shape
        self.norm = _norm(build, spec, shape.hidden, norm="rms", norm_plus_one=True)
        self.map = ReplicatedLinear(build, shape.hidden, spec.projector.hidden, spec.projector.bias)

    def forward(self, x_NPD: Tensor, grid: HasGrid) -> Tensor:
        return self.map(self.norm(cells_of(x_NPD, grid, self.merge).mean(1)))


class MergedMaps(nn.Module):
    """Mistral 3: a linear map of a cell back to the tower's width, then two as in LLaVA."""

    def __init__(self, build: ModelBuild, spec: VisionSpec) -> None:
        super().__init__()
        width, projector = spec.tower.shape.hidden, spec.projector
        self.size = projector.merge
        self.norm = _norm(build, spec, width, norm="rms")
        self.merge = ReplicatedLinear(build, width * projector.merge**2, width, bias=False)
        self.first = ReplicatedLinear(build, width, projector.hidden, projector.bias)
        self.second = ReplicatedLinear(build, projector.hidden, projector.hidden, projector.bias)
        self.activation = ACTIVATIONS[projector.activation]

    def forward(self, x_NPD: Tensor, grid: HasGrid) -> Tensor:
        cells_RCD = cells_of(self.norm(x_NPD), grid, self.size)
        merged_RD = self.merge(cells_RCD.transpose(1, 2).flatten(1))  # column by column of a cell
        return self.second(self.activation(self.first(merged_RD)))


class CellMaps(nn.Module):
    """Qwen-VL: two maps of the patches of a cell side by side, normed one by one, or `late`: together."""

    def __init__(self, build: ModelBuild, spec: VisionSpec, late: bool = False) -> None:
        super().__init__()
        self.merge, self.late = spec.projector.merge, late
        width = spec.tower.shape.hidden
        joined = width * self.merge**2
        self.norm = _norm(build, spec, joined if late else width, norm=spec.tower.shape.norm)
        self.first = ReplicatedLinear(build, joined, joined, bias=True)
        self.second = ReplicatedLinear(build, joined, spec.projector.hidden, bias=True)

    def forward(self, x_NPD: Tensor, grid: HasGrid) -> Tensor:
        if self.late:
            x_RE = self.norm(cells_of(x_NPD, grid, self.merge).flatten(1))
        else:
            x_RE = cells_of(self.norm(x_NPD), grid, self.merge).flatten(1)
        return self.second(ACTIVATIONS["gelu"](self.first(x_RE)))


def cells_of(x_NPD: Tensor, grid: HasGrid, merge: int) -> Tensor:
    """Patches of each cell of `merge` x `merge`, [R, merge * merge, D]."""
    rows, columns = grid.height // merge, grid.width // merge
    cells = x_NPD.reshape(len(x_NPD), rows, merge, columns, merge, x_NPD.shape[-1])
    return cells.permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(0, 2)


def _norm(build: ModelBuild, spec: VisionSpec, width: int, **form: Any) -> Norm:
    own = {"norm_eps": spec.projector.norm_eps, "norm_plus_one": False, **form}
    return Norm(build, msgspec.structs.replace(spec.tower.shape, **own), width)


KINDS: dict[str, type[nn.Module]] = {
    "mlp": TwoMaps,
    "shuffled": Shuffled,
    "linear": OneMap,
    "pooled": Pooled,
    "merged_mlp": MergedMaps,
    "cells": CellMaps,
}


def make_projector(build: ModelBuild, spec: VisionSpec) -> nn.Module:
    return KINDS[spec.projector.kind](build, spec)
