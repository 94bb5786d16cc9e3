"""Pictures through the tower: from their pixels to the rows that the decoder reads. With gradients, if they are on."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from cairn.models.vision.picture import Picture
from cairn.models.vision.prompt import rows_of
from cairn.models.vision.tiling_rules import ImageRules
from cairn.models.vision.tower import PatchGrid, Tower, patches_of


def picture_rows(tower: Tower, rules: ImageRules, pictures: Sequence[Picture]) -> list[Tensor]:
    """Embedding rows [R, D] of each image. Consecutive images of one size are batched."""
    spec, weight = tower.spec, tower.patch_embedding.weight
    mean_C, std_C = (torch.tensor(one, device=weight.device) for one in (rules.mean, rules.std))
    patches: list[Tensor] = []
    grids: list[PatchGrid] = []
    for _, same in groupby(pictures, lambda one: (one.tiles, one.height, one.width)):
        pixels_NHWC = whole_steps(_sent(list(same), weight.device), spec.tower.frames)
        normalised_NHWC = (pixels_NHWC.float() / 255 - mean_C) / std_C
        cut, own = patches_of(normalised_NHWC, spec.tower.patch, spec.tower.frames)
        patches.append(cut.to(weight.dtype))
        grids += own
    counts = [rows_of(spec, picture) for picture in pictures]
    return list(tower(torch.cat(patches), grids).split(counts))


def _sent(pictures: Sequence[Picture], device: torch.device) -> Tensor:
    """Pixels of all pictures on the device, copied once on the way: into memory that it reads by itself."""
    shape = (len(pictures), *pictures[0].array().shape)
    held_PTHWC = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for at, picture in enumerate(pictures):
        held_PTHWC.numpy()[at] = picture.array()
    return held_PTHWC.to(device, non_blocking=True)


def whole_steps(pixels_PTHWC: Tensor, frames: int) -> Tensor:
    """Tiles of all pictures, [N, H, W, 3]; the last one of each is repeated until `frames` divides their number."""
    missing = -pixels_PTHWC.shape[1] % frames
    if missing:
        last_PTHWC = pixels_PTHWC[:, -1:].expand(-1, missing, -1, -1, -1)
        pixels_PTHWC = torch.cat((pixels_PTHWC, last_PTHWC), dim=1)
    return pixels_PTHWC.flatten(0, 1)
