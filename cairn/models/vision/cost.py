"""Cost of images: weights and FLOPs of a vision encoder, and the number of tokens of an image. No torch.

Weights leave out biases and norms of the projector. Rows are those of the usual rules of a family
(`vision.tiling_rules` has them exactly, once the files of a checkpoint are there).
"""

import math

from cairn.models.vision.spec import VisionSpec

FIXED = ("llava", "paligemma", "gemma3")  # every picture becomes one of the tower's size


def tower_parameters(vision: VisionSpec) -> int:
    tower = vision.tower
    places = tower.table**2 or (tower.side**2 if tower.positions == "learned" else 0)
    table = places * tower.shape.hidden
    maps = (1 + len(tower.deep_layers)) * sum(_projector_matrices(vision))
    return tower.shape.parameters() + _patch_matrix(vision) + table + maps


def tower_flops(vision: VisionSpec, patches: int) -> int:
    """FLOPs for an image: all patches through the layers and their attention, all cells through the projector."""
    shape = vision.tower.shape
    windowed = vision.tower.window**2 or patches
    full = len(vision.tower.full_layers) if vision.tower.window else shape.layers
    pairs = patches * (full * patches + (shape.layers - full) * min(windowed, patches))
    matrices = shape.matmul_parameters() + _patch_matrix(vision)
    rows = patches // vision.projector.merge**2
    maps = (1 + len(vision.tower.deep_layers)) * sum(_projector_matrices(vision))
    return 2 * (matrices * patches + maps * rows) + 4 * shape.heads * shape.head_dim * pairs


def _patch_matrix(vision: VisionSpec) -> int:
    tower = vision.tower
    return 3 * tower.frames * tower.patch**2 * tower.shape.hidden


def _projector_matrices(vision: VisionSpec) -> tuple[int, ...]:
    """Sizes of what each row is multiplied with, once."""
    width, projector = vision.tower.shape.hidden, vision.projector
    wide, out = width * (1 if projector.kind == "pooled" else projector.merge**2), projector.hidden
    match projector.kind:
        case "mlp":
            return wide * out, out * out
        case "merged_mlp":
            return wide * width, width * out, out * out
        case "cells":
            return wide * wide, wide * out
    return (wide * out,)


def picture_rows(vision: VisionSpec, height: int, width: int) -> int:
    """Tokens of a picture of so many pixels."""
    side, cell = vision.tower.image, vision.cell
    if vision.family in FIXED:
        return vision.rows(side, side)
    if vision.family == "idefics3":  # in tiles, and the whole once more
        tiles = math.ceil(height / side) * math.ceil(width / side)
        return vision.rows(side, side) * (tiles + 1 if tiles > 1 else 1)
    return max(1, round(height / cell)) * max(1, round(width / cell))


def patches_of_rows(vision: VisionSpec, rows: int) -> int:
    return rows * vision.projector.merge**2
