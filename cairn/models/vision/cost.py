"""What pictures cost: weights and FLOPs of a tower, and the tokens that a picture of some size becomes. No torch.

Weights leave out biases and norms of the projector. Rows are those of the usual rules of a family (`vision.rules` has
them exactly, once the files of a checkpoint are there).
"""

import math

from cairn.models.vision.spec import VisionSpec

FIXED = ("llava", "paligemma", "gemma3")  # every picture becomes one of the tower's size


def tower_parameters(vision: VisionSpec) -> int:
    tower, projector = vision.tower, vision.projector
    patch = 3 * tower.frames * tower.patch**2 * tower.shape.hidden
    wide = tower.shape.hidden * (1 if projector.kind == "pooled" else projector.merge**2)
    maps = {
        "mlp": wide * projector.hidden + projector.hidden**2,
        "merged_mlp": wide * tower.shape.hidden
        + tower.shape.hidden * projector.hidden
        + projector.hidden**2,
        "cells": wide**2 + wide * projector.hidden,
    }.get(projector.kind, wide * projector.hidden)
    places = tower.table**2 or (tower.side**2 if tower.positions == "learned" else 0)
    table = places * tower.shape.hidden
    return tower.shape.parameters() + patch + table + (1 + len(tower.deep_layers)) * maps


def tower_flops(vision: VisionSpec, patches: int) -> int:
    """Of one picture: every patch through every matrix of the layers, and with every other patch it sees."""
    shape = vision.tower.shape
    seen = vision.tower.window**2 or patches
    full = len(vision.tower.full_layers) if vision.tower.window else shape.layers
    pairs = patches * (full * patches + (shape.layers - full) * min(seen, patches))
    return 2 * shape.matmul_parameters() * patches + 4 * shape.heads * shape.head_dim * pairs


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
