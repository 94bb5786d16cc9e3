"""Pictures through the tower: from their pixels to the rows that the decoder reads. With gradients, if they are on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.models.vision.picture import Picture
from cairn.models.vision.prompt import rows_of
from cairn.models.vision.rules import ImageRules
from cairn.models.vision.tower import Grid, Tower, patches_of


def picture_rows(tower: Tower, rules: ImageRules, pictures: Sequence[Picture]) -> list[Tensor]:
    """Of each picture, [R, D]."""
    spec, weight = tower.spec, tower.patch_embedding.weight
    mean_C, std_C = (torch.tensor(one, device=weight.device) for one in (rules.mean, rules.std))
    patches: list[Tensor] = []
    grids: list[Grid] = []
    for picture in pictures:
        pixels = torch.from_numpy(picture.array().copy()).to(weight.device)
        normalised = (pixels.float() / 255 - mean_C) / std_C
        cut, own = patches_of(normalised, spec.tower.patch, spec.tower.frames)
        patches.append(cut)
        grids += own
    counts = [rows_of(spec, picture) for picture in pictures]
    return list(tower(torch.cat(patches).to(weight.dtype), grids).split(counts))
