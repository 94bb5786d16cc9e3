"""Tiling rules of images: sizes only, no pixels.

    fixed      every picture becomes one tile of one size, cropped where that is asked for    LLaVA
    tiled      tiles of one size in rows and columns, and the whole picture once more          Idefics 3, SmolVLM
    patches    one tile, as large as the picture in whole patches                              Pixtral, Mistral 3
    area       one tile in whole cells, of so many pixels at least and at most                 Qwen-VL

The reference is transformers' image processors with their Pillow backend. No torch and no Pillow.
"""

import math
from typing import Literal, NamedTuple

import msgspec

LARGEST_SIDE = 4096  # pixels that a tiled picture is ever resized to


class ImageRules(msgspec.Struct, frozen=True):
    kind: Literal["fixed", "tiled", "patches", "area"]
    height: int  # of a tile; of patches: the most
    width: int
    resample: int  # as Pillow counts
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    shortest: int = 0  # fixed: the shorter side becomes this long, and the middle is cropped
    longest: int = 0  # tiled: the longer side becomes this long before it is cut
    cell: int = 1  # patches, area: sides are multiples of this
    least_pixels: int = 0  # area: of a picture
    most_pixels: int = 0
    over_frames: bool = False  # area: of all frames of a video together


class Size(NamedTuple):
    height: int
    width: int


class TileLayout(NamedTuple):
    """Tiling of an image: the sizes it is resized to in turn, then the grid of tiles."""

    resized: tuple[Size, ...]
    tile: Size
    rows: int = 0  # of tiles; 0: there is one, the whole picture
    columns: int = 0

    @property
    def tiles(self) -> int:
        return self.rows * self.columns + 1


def layout_of(rules: ImageRules, height: int, width: int, frames: int = 1) -> TileLayout:
    """Layout of an image, or of each frame of a video, by its size."""
    tile = Size(rules.height, rules.width)
    if rules.kind in ("patches", "area"):
        count = frames if rules.over_frames else 1
        if rules.kind == "patches":
            resized = _in_patches(rules, height, width)
        else:
            resized = _in_area(rules, height, width, count)
        return TileLayout((resized,), resized)
    if rules.kind == "tiled":
        return _tiled(rules, height, width)
    if not rules.shortest:
        return TileLayout((tile,), tile)
    short, long = min(height, width), max(height, width)
    longer = int(rules.shortest * long / short)
    upright = width <= height
    resized = Size(longer, rules.shortest) if upright else Size(rules.shortest, longer)
    return TileLayout((resized,), tile)


def _in_patches(rules: ImageRules, height: int, width: int) -> Size:
    ratio = max(height / rules.height, width / rules.width)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    cell = rules.cell
    return Size(((height - 1) // cell + 1) * cell, ((width - 1) // cell + 1) * cell)


def _in_area(rules: ImageRules, height: int, width: int, frames: int) -> Size:
    cell, most, least = rules.cell, rules.most_pixels, rules.least_pixels
    tall, wide = round(height / cell) * cell, round(width / cell) * cell
    # Frames are counted in pairs, as the tower takes them, but not where the scale is found: as the reference does.
    pairs = round(frames / 2) * 2 if frames > 1 else 1
    if pairs * tall * wide > most:
        shrink = math.sqrt(frames * height * width / most)
        tall = max(cell, math.floor(height / shrink / cell) * cell)
        wide = max(cell, math.floor(width / shrink / cell) * cell)
    elif pairs * tall * wide < least:
        grow = math.sqrt(least / (frames * height * width))
        tall = math.ceil(height * grow / cell) * cell
        wide = math.ceil(width * grow / cell) * cell
    return Size(tall, wide)


def _tiled(rules: ImageRules, height: int, width: int) -> TileLayout:
    side, sizes = rules.height, []
    if rules.longest:
        height, width = _longest_edge(height, width, rules.longest)
        sizes.append(Size(height, width))
    aspect = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / aspect) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * aspect) / side) * side
    sizes.append(Size(height, width))
    tile = Size(side, side)
    if height <= side and width <= side:
        return TileLayout(tuple(sizes), tile)
    return TileLayout(tuple(sizes), tile, height // side, width // side)


def _longest_edge(height: int, width: int, longest: int) -> Size:
    aspect = width / height
    if width >= height:
        height, width = _even(int(longest / aspect)), longest
    else:
        height, width = longest, _even(int(longest * aspect))
    height, width = max(height, 1), max(width, 1)
    if max(height, width) > LARGEST_SIDE:
        aspect = width / height
        if width >= height:
            height, width = int(LARGEST_SIDE / aspect), LARGEST_SIDE
        else:
            height, width = LARGEST_SIDE, int(LARGEST_SIDE * aspect)
    return Size(max(height, 1), max(width, 1))


def _even(length: int) -> int:
    return length + length % 2
