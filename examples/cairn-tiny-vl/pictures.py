"""Pictures that are drawn by rule: colored shapes that do not overlap, or a printed number. By torch, on any device.

scenes(count, generator) -> Scenes -draw-> uint8 [B, 128, 128, 3]
"""

from typing import NamedTuple

import torch
from torch import Tensor

SIDE = 128  # pixels
CELLS = (1, 2, 2, 3, 3, 4, 4, 4)  # along a side, one of these; a shape stays in its cell
MOST = 9  # shapes
SHAPES = ("circle", "square", "triangle")
COLORS = {
    "red": (214, 39, 40),
    "green": (44, 150, 54),
    "blue": (31, 98, 220),
    "yellow": (240, 205, 30),
    "purple": (140, 60, 190),
    "orange": (250, 135, 20),
}
BACKGROUNDS = ((255, 255, 255), (236, 236, 232), (206, 212, 218), (30, 32, 38))
FONT = (  # digits of 5 x 7 points, a row of bits each
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)


class Scenes(NamedTuple):
    present_BK: Tensor
    shape_BK: Tensor
    color_BK: Tensor
    x_BK: Tensor  # pixels
    y_BK: Tensor
    radius_BK: Tensor
    number_B: Tensor  # what is printed; -1: shapes
    background_B: Tensor
    print_B4: Tensor  # of a number: left, top, pixels of a point, color


def scenes(count: int, generator: torch.Generator) -> Scenes:
    device = generator.device

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    def share(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    cells_B1 = torch.tensor(CELLS, device=device)[draw(0, len(CELLS), count, 1)]
    order_BC = share(count, max(CELLS) ** 2)
    absent_BC = torch.arange(max(CELLS) ** 2, device=device) >= cells_B1**2
    cell_BK = order_BC.masked_fill(absent_BC, 2.0).argsort(1)[:, :MOST]
    size_B1 = SIDE / cells_B1
    radius_BK = size_B1 * (0.22 + 0.22 * share(count, MOST))
    room_BK = size_B1 / 2 - 1 - radius_BK
    shift_2BK = 2 * share(2, count, MOST) - 1
    x_BK = (cell_BK % cells_B1 + 0.5) * size_B1 + shift_2BK[0] * room_BK
    y_BK = (cell_BK // cells_B1 + 0.5) * size_B1 + shift_2BK[1] * room_BK
    most_B1 = (cells_B1**2).clamp(max=MOST)
    present_BK = torch.arange(MOST, device=device) <= share(count, 1) * most_B1
    # Few kinds in a picture, so that some of them are there several times.
    palette_BP, shapes_BP = draw(0, len(COLORS), count, 3), draw(0, len(SHAPES), count, 3)
    color_BK = palette_BP.gather(1, draw(0, 3, count, MOST))
    shape_BK = shapes_BP.gather(1, draw(0, 3, count, MOST))
    printed_B = draw(0, 5, count) == 0
    digits_B = draw(1, 4, count)
    most_B = torch.tensor([10, 100, 1000], device=device)[digits_B - 1]
    number_B = torch.where(printed_B, draw(0, 10**6, count) % most_B, -1)
    point_B = draw(3, 7, count)
    width_B = point_B * (6 * digits_of(number_B.clamp(min=0)) - 1)
    left_B = (share(count) * (SIDE - width_B)).long()
    top_B = (share(count) * (SIDE - 7 * point_B)).long()
    print_B4 = torch.stack((left_B.clamp(min=0), top_B, point_B, draw(0, len(COLORS), count)), 1)
    present_BK = present_BK & ~printed_B[:, None]
    background_B = draw(0, len(BACKGROUNDS), count)
    return Scenes(
        present_BK, shape_BK, color_BK, x_BK, y_BK, radius_BK, number_B, background_B, print_B4
    )


def digits_of(number_B: Tensor) -> Tensor:
    return 1 + (number_B >= 10).long() + (number_B >= 100).long()


def draw(found: Scenes) -> Tensor:
    """uint8 [B, 128, 128, 3], with soft edges."""
    device = found.x_BK.device
    at = torch.arange(SIDE, device=device) + 0.5
    y, x = at[None, :, None], at[None, None, :]
    paint = torch.tensor(list(COLORS.values()), dtype=torch.float32, device=device)
    ground = torch.tensor(BACKGROUNDS, dtype=torch.float32, device=device)
    picture = ground[found.background_B][:, None, None].repeat(1, SIDE, SIDE, 1)
    for k in range(MOST):
        dx = x - found.x_BK[:, k, None, None]
        dy = y - found.y_BK[:, k, None, None]
        radius, shape = found.radius_BK[:, k, None, None], found.shape_BK[:, k, None, None]
        cover = (0.5 - _distance(dx, dy, radius, shape)).clamp(0, 1)
        cover = (cover * found.present_BK[:, k, None, None])[..., None]
        color = paint[found.color_BK[:, k]][:, None, None]
        picture = picture + cover * (color - picture)
    ink = _ink(found, x, y)[..., None]
    color = paint[found.print_B4[:, 3]][:, None, None]
    return (picture + ink * (color - picture)).round().to(torch.uint8)


def _distance(dx: Tensor, dy: Tensor, radius: Tensor, shape: Tensor) -> Tensor:
    """Pixels to the edge; negative inside."""
    circle = (dx**2 + dy**2).sqrt() - radius
    square = torch.maximum(dx.abs(), dy.abs()) - 0.85 * radius
    low = dy - radius / 2
    triangle = torch.maximum(low, 0.866 * dx.abs() - dy / 2 - radius / 2)
    return torch.where(shape == 0, circle, torch.where(shape == 1, square, triangle))


def _ink(found: Scenes, x: Tensor, y: Tensor) -> Tensor:
    """Where a number is printed, [B, 128, 128]."""
    device = found.x_BK.device
    bits = torch.tensor(FONT, device=device)[:, :, None] >> torch.arange(4, -1, -1, device=device)
    font = torch.nn.functional.pad((bits & 1).float(), (0, 1))  # [10, 7, 6]
    left, top, point = (found.print_B4[:, at, None, None] for at in range(3))
    column, row = ((x - left) / point).floor().long(), ((y - top) / point).floor().long()
    count = digits_of(found.number_B.clamp(min=0))[:, None, None]
    place = column.div(6, rounding_mode="floor")
    inside = (column >= 0) & (place < count) & (row >= 0) & (row < 7)
    power = 10 ** (count - 1 - place).clamp(0, 2)
    digit = found.number_B.clamp(min=0)[:, None, None] // power % 10
    ink = font[digit, row.clamp(0, 6), (column % 6)]
    return ink * inside * (found.number_B >= 0)[:, None, None]
