"""The tower: pictures cut into patches in, rows for the decoder's placeholders out.

    pixels [N, H, W, 3] -patches-> [P, 3 p p] -linear, positions-> x [P, D] -layers-> x -projector-> rows [R, D']

Its layers are the decoder's `Layer`; that patches see each other both ways is the business of `attend`. Tiles of
several pictures are packed side by side, each a sequence of its own.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cairn.models.attend import Attend, AttentionRule
from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.cpu_half_precision import linear
from cairn.models.encoder.attend import Bidirectional
from cairn.models.encoder.model import packed_step
from cairn.models.layer_loop import ForwardStep, PlainResidual, Residual, run_layers
from cairn.models.layers import Norm
from cairn.models.rope import Rotation
from cairn.models.spec import Rope
from cairn.models.transformer import Layer, PositionEmbedding
from cairn.models.vision.projector import CellMaps, make_projector
from cairn.models.vision.spec import TowerPositions, TowerSpec, VisionSpec


class PatchGrid(NamedTuple):
    """Patches of one tile."""

    height: int
    width: int

    @property
    def patches(self) -> int:
        return self.height * self.width


class PatchEmbedding(SlotModule):
    """A linear map of the pixels of a patch; checkpoints store it as a convolution."""

    def __init__(self, build: ModelBuild, spec: TowerSpec) -> None:
        super().__init__()
        frames = (spec.frames,) if spec.frames > 1 else ()
        self.kernel = (spec.shape.hidden, 3, *frames, spec.patch, spec.patch)
        self.weight = build.parameter(*self.kernel)
        self.bias = build.parameter(spec.shape.hidden) if spec.patch_bias else None

    def forward(self, patches_PE: Tensor) -> Tensor:
        return linear(patches_PE, self.weight.flatten(1), self.bias)

    def slots(self) -> Iterator[Slot]:
        yield Slot("weight", "weight", self.kernel)
        if self.bias is not None:
            yield Slot("bias", "bias", self.kernel[:1], init="zeros")


class ClassToken(SlotModule):
    def __init__(self, build: ModelBuild, width: int) -> None:
        super().__init__()
        self.weight = build.parameter(width)

    def slots(self) -> Iterator[Slot]:
        yield Slot("weight", "weight", tuple(self.weight.shape))


class Tower(nn.Module):
    """Built empty, on the meta device; `vision.load` fills it."""

    def __init__(self, spec: VisionSpec, build: ModelBuild = ModelBuild()) -> None:  # noqa: B008 (immutable)
        super().__init__()
        tower, shape = spec.tower, spec.tower.shape
        self.spec, self.build = spec, build
        self.patch_embedding = PatchEmbedding(build, tower)
        self.class_token = ClassToken(build, shape.hidden) if tower.class_token else None
        self.position_embedding: PositionEmbedding | None = None
        if tower.positions == "learned":
            count = tower.side**2 + tower.class_token
            self.position_embedding = PositionEmbedding(build, count, shape.hidden)
        self.position_table = (
            PositionEmbedding(build, tower.table**2, shape.hidden) if tower.table else None
        )
        self.pre_norm = Norm(build, shape, shape.hidden) if tower.pre_norm else None
        self.layers = nn.ModuleList(Layer(build, shape, at) for at in range(shape.layers))
        self.post_norm = Norm(build, shape, shape.hidden) if tower.post_norm else None
        self.projector = make_projector(build, spec)
        self.deep = nn.ModuleList(CellMaps(build, spec, late=True) for _ in tower.deep_layers)

    def forward(self, patches_PE: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
        """Rows of all tiles, [R, D'], and beside them those for deeper layers; `patches_PE`: tile behind tile."""
        hidden_PD, deep = self.hidden(patches_PE, grids)
        parts = [_projected(self.projector, hidden_PD, grids)]
        for merger, tapped_PD in zip(self.deep, deep, strict=True):
            parts.append(_projected(merger, tapped_PD, grids))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def hidden(self, patches_PE: Tensor, grids: Sequence[PatchGrid]) -> tuple[Tensor, list[Tensor]]:
        """Input of the projector [P, D], and the hidden states after `deep_layers`."""
        tower = self.spec.tower
        x_PD = self._placed(self.patch_embedding(patches_PE), grids)
        extra = int(self.class_token is not None)
        attend: Attend = Bidirectional([grid.patches + extra for grid in grids], x_PD.device)
        rotations = self._rotations(grids, x_PD)
        order_P: Tensor | None = None
        if tower.window:
            order_P, lengths = window_order(grids, tower.window, x_PD.device)
            windows = Bidirectional(lengths, x_PD.device)
            attend, x_PD = ByLayer(attend, windows, tower.full_layers), x_PD[order_P]
            rotations = {
                rope: _reordered(rotation, order_P) for rope, rotation in rotations.items()
            }
        if self.pre_norm is not None:
            x_PD = self.pre_norm(x_PD)
        step = packed_step(x_PD, attend, tower.shape, rotations)
        first, layers = packed_residual(x_PD, step), enumerate(self.layers)
        residual, deep = run_layers(layers, first, step, tower.deep_layers)
        x_PD = residual.hidden()
        if self.post_norm is not None:
            x_PD = self.post_norm(x_PD)
        if order_P is not None:
            x_PD = torch.empty_like(x_PD).index_copy(0, order_P, x_PD)
        if extra:
            without = [x_NPD[:, 1:].flatten(0, 1) for _, x_NPD in runs(x_PD, grids, extra)]
            x_PD = torch.cat(without)
        return x_PD, deep

    def _placed(self, x_PD: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
        """Add class tokens and learned position embeddings."""
        if self.position_table is not None:
            side, table_SD = self.spec.tower.table, self.position_table.weight
            stretched = {grid: stretched_table(table_SD, side, grid) for grid in set(grids)}
            return x_PD + torch.cat([stretched[grid] for grid in grids]).to(x_PD.dtype)
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

    def _check_size(self, grid: PatchGrid) -> None:
        side = self.spec.tower.side
        if tuple(grid) != (side, side):
            raise ValueError(f"a tile of {grid.height} x {grid.width} patches, not {side} x {side}")

    def _rotations(self, grids: Sequence[PatchGrid], x_PD: Tensor) -> dict[Rope, Rotation]:
        shape = self.spec.tower.shape
        kind = self.spec.tower.positions
        if kind == "learned":
            return {}
        return {shape.rope: grid_rotation(shape.rope, shape.head_dim, grids, x_PD, kind)}

    def slots(self) -> Iterator[Slot]:
        """Every tensor this model needs, by name, and where it goes."""
        for path, module in self.named_modules():
            if isinstance(module, SlotModule):
                yield from (slot.under(path) for slot in module.slots())


def packed_residual(x_PD: Tensor, step: ForwardStep) -> Residual:
    """Residual of a step; the fused one overwrites x."""
    if not step.fuses:
        return PlainResidual(x_PD)
    from cairn.models.fused import FusedResidual

    return FusedResidual(x_PD)


def runs(
    x_PD: Tensor, grids: Sequence[PatchGrid], extra: int = 0
) -> Iterator[tuple[PatchGrid, Tensor]]:
    """Neighbouring tiles of one size, [N, P, D]; each tile has `extra` tokens beside its patches."""
    start = 0
    for grid, same in groupby(grids):
        count, length = sum(1 for _ in same), grid.patches + extra
        yield grid, x_PD[start : start + count * length].unflatten(0, (count, length))
        start += count * length


def _projected(projector: nn.Module, x_PD: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
    return torch.cat([projector(x_NPD, grid) for grid, x_NPD in runs(x_PD, grids)])


class ByLayer:
    """Windows in most layers, whole pictures in some. An `Attend`."""

    def __init__(self, full: Attend, windows: Attend, full_layers: Collection[int]) -> None:
        self.full, self.windows, self.full_layers = full, windows, frozenset(full_layers)

    def lengths_T(self) -> Tensor:
        return self.full.lengths_T()

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        attend = self.full if rule.layer in self.full_layers else self.windows
        return attend(q_THC, k_TKC, v_TKC, rule)


def window_order(
    grids: Sequence[PatchGrid], side: int, device: torch.device
) -> tuple[Tensor, list[int]]:
    """Patches window by window, those of a tile one behind the other, and how many each window has."""
    orders, lengths, start = [], [], 0
    for grid in grids:
        places = torch.arange(start, start + grid.patches, device=device)
        for band in places.view(grid.height, grid.width).split(side, dim=0):
            for window in band.split(side, dim=1):
                orders.append(window.flatten())
                lengths.append(window.numel())
        start += grid.patches
    return torch.cat(orders), lengths


def _reordered(rotation: Rotation, order_P: Tensor) -> Rotation:
    return Rotation(rotation.cos_T1C[order_P], rotation.sin_T1C[order_P])


def stretched_table(table_SD: Tensor, side: int, grid: PatchGrid) -> Tensor:
    """Learned positions of a square, interpolated to a grid whose corners are the square's; [P, D]."""

    def taps(count: int) -> tuple[Tensor, Tensor, Tensor]:
        places = torch.arange(count, dtype=torch.float32, device=table_SD.device)
        places = places * (side - 1) / max(count - 1, 1)
        low = places.floor()
        return low.long(), (low.long() + 1).clamp(max=side - 1), places - low

    top_H, bottom_H, down_H = taps(grid.height)
    left_W, right_W, across_W = taps(grid.width)
    square = table_SD.view(side, side, -1).float()
    across_W1 = across_W[:, None]

    def row(at_H: Tensor) -> Tensor:
        lines = square[at_H]
        return lines[:, left_W] * (1 - across_W1) + lines[:, right_W] * across_W1

    down_H11 = down_H[:, None, None]
    return (row(top_H) * (1 - down_H11) + row(bottom_H) * down_H11).flatten(0, 1)


def grid_rotation(
    rope: Rope, head_dim: int, grids: Sequence[PatchGrid], x_PD: Tensor, kind: TowerPositions
) -> Rotation:
    """Rotary positions of a plane: even frequencies turn by the row, odd ones by the column (Pixtral).

    `axial`: the even ones by the row and once more by the column (Qwen-VL).
    """
    device = x_PD.device
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = 1.0 / rope.theta**exponents
    across = angles[::2] if kind == "axial" else angles[1::2]
    by_grid = {}
    for grid in set(grids):
        row_P = torch.arange(grid.height, device=device).repeat_interleave(grid.width).float()
        column_P = torch.arange(grid.width, device=device).repeat(grid.height).float()
        by_grid[grid] = torch.cat((row_P[:, None] * angles[::2], column_P[:, None] * across), 1)
    angles_P1c = torch.cat([by_grid[grid] for grid in grids])[:, None]
    both = torch.cat((angles_P1c, angles_P1c), dim=-1)
    return Rotation(both.cos().to(x_PD.dtype), both.sin().to(x_PD.dtype))


def patches_of(pixels_NHWC: Tensor, patch: int, frames: int = 1) -> tuple[Tensor, list[PatchGrid]]:
    """Tiles of one size, cut: [P, 3 f p p] in the order of a convolution's kernel, and the grid of each.

    `frames`: so many tiles become one of the tower's; it divides their number.
    """
    _, height, width, channels = pixels_NHWC.shape
    grid = PatchGrid(height // patch, width // patch)
    # What is left over below and to the right of the last whole patch, a convolution does not see either.
    kept_NHWC = pixels_NHWC[:, : grid.height * patch, : grid.width * patch]
    x = kept_NHWC.reshape(-1, frames, grid.height, patch, grid.width, patch, channels)
    patches_PE = x.permute(0, 2, 4, 6, 1, 3, 5).reshape(len(x) * grid.patches, -1)
    return patches_PE, [grid] * len(x)
