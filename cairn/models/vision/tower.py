"""The tower: pictures cut into patches in, rows for the decoder's placeholders out.

    pixels [N, H, W, 3] -patches-> [P, 3 p p] -linear, positions-> x [P, D] -layers-> x -projector-> rows [R, D']

Its layers are the decoder's `Layer`; that patches see each other both ways is the business of `attend`. Tiles of
several pictures are packed side by side, each a sequence of its own.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.models.build import Build, Holder, Slot
from cairn.models.encoder.attend import Bidirectional
from cairn.models.layer_loop import PlainResidual, PlainStep, run_layers
from cairn.models.layers import Norm
from cairn.models.rope import Rotation
from cairn.models.spec import Rope
from cairn.models.transformer import Layer, Positions
from cairn.models.vision.projector import make_projector
from cairn.models.vision.spec import TowerSpec, VisionSpec


class Grid(NamedTuple):
    """Patches of one tile."""

    height: int
    width: int

    @property
    def patches(self) -> int:
        return self.height * self.width


class PatchEmbedding(Holder):
    """A linear map of the pixels of a patch; checkpoints store it as a convolution."""

    def __init__(self, build: Build, spec: TowerSpec) -> None:
        super().__init__()
        self.kernel = (spec.shape.hidden, 3, spec.patch, spec.patch)
        self.weight = build.parameter(*self.kernel)
        self.bias = build.parameter(spec.shape.hidden) if spec.patch_bias else None

    def forward(self, patches_PE: Tensor) -> Tensor:
        return F.linear(patches_PE, self.weight.flatten(1), self.bias)

    def slots(self) -> Iterator[Slot]:
        yield Slot("weight", "weight", self.kernel)
        if self.bias is not None:
            yield Slot("bias", "bias", self.kernel[:1], init="zeros")


class ClassToken(Holder):
    def __init__(self, build: Build, width: int) -> None:
        super().__init__()
        self.weight = build.parameter(width)

    def slots(self) -> Iterator[Slot]:
        yield Slot("weight", "weight", tuple(self.weight.shape))


class Tower(nn.Module):
    """Built empty, on the meta device; `vision.load` fills it."""

    def __init__(self, spec: VisionSpec, build: Build = Build()) -> None:  # noqa: B008 (immutable)
        super().__init__()
        tower, shape = spec.tower, spec.tower.shape
        self.spec, self.build = spec, build
        self.patch_embedding = PatchEmbedding(build, tower)
        self.class_token = ClassToken(build, shape.hidden) if tower.class_token else None
        self.position_embedding: Positions | None = None
        if tower.positions == "learned":
            count = tower.side**2 + tower.class_token
            self.position_embedding = Positions(build, count, shape.hidden)
        self.pre_norm = Norm(build, shape, shape.hidden) if tower.pre_norm else None
        self.layers = nn.ModuleList(Layer(build, shape, at) for at in range(shape.layers))
        self.post_norm = Norm(build, shape, shape.hidden) if tower.post_norm else None
        self.projector = make_projector(build, spec)

    def forward(self, patches_PE: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Rows of all tiles, [R, D']; `patches_PE`: of the tiles one behind the other."""
        hidden_PD = self.hidden(patches_PE, grids)
        return torch.cat([self.projector(x_NPD, grid) for grid, x_NPD in runs(hidden_PD, grids)])

    def hidden(self, patches_PE: Tensor, grids: Sequence[Grid]) -> Tensor:
        """What the projector reads, [P, D]."""
        x_PD = self._placed(self.patch_embedding(patches_PE), grids)
        extra = int(self.class_token is not None)
        lengths = [grid.patches + extra for grid in grids]
        attend = Bidirectional(lengths, x_PD.device)
        if self.pre_norm is not None:
            x_PD = self.pre_norm(x_PD)
        step = PlainStep(attend, self._rotations(grids, x_PD))
        residual, _ = run_layers(enumerate(self.layers), PlainResidual(x_PD), step)
        x_PD = residual.hidden()
        if self.post_norm is not None:
            x_PD = self.post_norm(x_PD)
        if not extra:
            return x_PD
        return torch.cat([x_NPD[:, 1:].flatten(0, 1) for _, x_NPD in runs(x_PD, grids, extra)])

    def _placed(self, x_PD: Tensor, grids: Sequence[Grid]) -> Tensor:
        """With class tokens, and with positions where those are learned."""
        if self.position_embedding is None:
            return x_PD
        tiles, places_PD = [], self.position_embedding.weight
        for grid, x_NPD in runs(x_PD, grids):
            self._check_size(grid)
            if self.class_token is not None:
                first_N1D = self.class_token.weight.expand(len(x_NPD), 1, -1)
                x_NPD = torch.cat((first_N1D, x_NPD), dim=1)
            tiles.append((x_NPD + places_PD).flatten(0, 1))
        return torch.cat(tiles)

    def _check_size(self, grid: Grid) -> None:
        side = self.spec.tower.side
        if tuple(grid) != (side, side):
            raise ValueError(f"a tile of {grid.height} x {grid.width} patches, not {side} x {side}")

    def _rotations(self, grids: Sequence[Grid], x_PD: Tensor) -> dict[Rope, Rotation]:
        shape = self.spec.tower.shape
        if self.spec.tower.positions != "rotary":
            return {}
        return {shape.rope: grid_rotation(shape.rope, shape.head_dim, grids, x_PD)}

    def slots(self) -> Iterator[Slot]:
        """Every tensor this model needs, by name, and where it goes."""
        for path, module in self.named_modules():
            if isinstance(module, Holder):
                yield from (slot.under(path) for slot in module.slots())


def runs(x_PD: Tensor, grids: Sequence[Grid], extra: int = 0) -> Iterator[tuple[Grid, Tensor]]:
    """Neighbouring tiles of one size, [N, P, D]; each tile has `extra` tokens beside its patches."""
    start = 0
    for grid, same in groupby(grids):
        count, length = sum(1 for _ in same), grid.patches + extra
        yield grid, x_PD[start : start + count * length].unflatten(0, (count, length))
        start += count * length


def grid_rotation(rope: Rope, head_dim: int, grids: Sequence[Grid], x_PD: Tensor) -> Rotation:
    """Rotary positions of a plane: even frequencies turn by the row, odd ones by the column (Pixtral)."""
    device = x_PD.device
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = 1.0 / rope.theta**exponents
    parts = []
    for grid in grids:
        row_P = torch.arange(grid.height, device=device).repeat_interleave(grid.width).float()
        column_P = torch.arange(grid.width, device=device).repeat(grid.height).float()
        parts.append(torch.cat((row_P[:, None] * angles[::2], column_P[:, None] * angles[1::2]), 1))
    angles_P1c = torch.cat(parts)[:, None]
    both = torch.cat((angles_P1c, angles_P1c), dim=-1)
    return Rotation(both.cos().to(x_PD.dtype), both.sin().to(x_PD.dtype))


def patches_of(pixels_NHWC: Tensor, patch: int) -> tuple[Tensor, list[Grid]]:
    """Tiles of one size, cut: [P, 3 p p] in the order of a convolution's kernel, and the grid of each."""
    tiles, height, width, channels = pixels_NHWC.shape
    grid = Grid(height // patch, width // patch)
    x = pixels_NHWC.view(tiles, grid.height, patch, grid.width, patch, channels)
    return x.permute(0, 1, 3, 5, 2, 4).reshape(tiles * grid.patches, -1), [grid] * tiles
