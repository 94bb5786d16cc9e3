"""Runs the tower over pictures and writes their rows into the arena."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cairn.models.vision.encode import picture_rows
from cairn.models.vision.picture import Picture
from cairn.models.vision.tiling_rules import ImageRules
from cairn.models.vision.tower import Tower
from cairn.serve.engine.media import NewRows

MOST_PATCHES = {"cpu": 2048, "cuda": 32768}  # of one call


class TowerRunner:
    def __init__(
        self, tower: Tower, rules: ImageRules, write: Callable[[int, Tensor], None]
    ) -> None:
        """`write` puts rows into the arena from a row of it on."""
        self.tower, self.rules, self.write = tower, rules, write
        self.device = tower.patch_embedding.weight.device

    def patches(self, picture: Picture) -> int:
        patch = self.tower.spec.tower.patch
        steps = self.tower.spec.steps(picture.tiles)
        return steps * (picture.height // patch) * (picture.width // patch)

    @torch.inference_mode()
    def encode(self, new: Sequence[NewRows]) -> None:
        """Encode images in batches of at most `MOST_PATCHES`, unless a single image has more."""
        batch: list[NewRows] = []
        patches, most = 0, MOST_PATCHES[self.device.type]
        for one in new:
            own = self.patches(one.picture)
            if batch and patches + own > most:
                self._encode(batch)
                batch, patches = [], 0
            batch.append(one)
            patches += own
        if batch:
            self._encode(batch)

    def _encode(self, new: Sequence[NewRows]) -> None:
        rows = self.rows([one.picture for one in new])
        for one, rows_RD in zip(new, rows, strict=True):
            for row, piece in one.parts:
                self.write(row, rows_RD[piece.offset : piece.offset + piece.length])

    def rows(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """Embedding rows [R, D] of each image."""
        return picture_rows(self.tower, self.rules, pictures)
