"""What does a picture cost a model that sees: tokens, FLOPs of the tower, and when is nothing computed at all?

    pixels -round to cells-> rows = tokens of the prompt        grow with the area
    patches -tower-> rows                                       attention grows with its square

The real rules of Qwen-VL resize, the real tower is counted by torch, and the real arena keeps rows of pictures that
were seen before.
"""

import os
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench
from cairn.models.spec import ModelSpec, Rope
from cairn.models.vision.cost import tower_flops
from cairn.models.vision.spec import ProjectorSpec, TowerSpec, VisionSpec
from cairn.models.vision.tiling_rules import ImageRules, layout_of

if TYPE_CHECKING:
    from cairn.models.vision.tower import Tower

PATCH, MERGE = 14, 2
CELL = PATCH * MERGE
NORMAL = (0.5, 0.5, 0.5)
RULES = ImageRules(
    "area", 0, 0, 3, NORMAL, NORMAL, cell=CELL, least_pixels=56 * 56, most_pixels=4096 * 4096
)
SHAPE = ModelSpec(
    family="qwen2_vl",
    vocab=1,
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=16,
    intermediate=256,
    context=1,
    norm="layer",
    gated=False,
    activation="gelu",
    rope=Rope(),
)
SPEC = VisionSpec(
    "qwen2_vl",
    TowerSpec(SHAPE, PATCH, PATCH, positions="axial", patch_bias=False),
    ProjectorSpec("cells", hidden=64, merge=MERGE),
    image_token=0,
    axes=True,
)


def tokens_of(side: int) -> int:
    """Of a square picture, by the rules."""
    tile = layout_of(RULES, side, side).tile
    return SPEC.rows(tile.height, tile.width)


def counted_flops(tower: "Tower", side: int) -> int:
    """Of the tower over one picture, as torch counts them."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from cairn.models.vision.tower import PatchGrid

    grid = PatchGrid(side // PATCH, side // PATCH)
    patches_PE = torch.zeros(grid.patches, 3 * PATCH * PATCH)
    # The counter knows products; attention that is one operation on a CPU would count as nothing.
    with (
        torch.inference_mode(),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        tower(patches_PE, [grid])
    return counter.get_total_flops()


def towers_work(requests: int, pictures: int) -> int:
    """How many pictures are computed where so many requests show so few different ones, one after another."""
    from cairn.serve.engine.pieces import ArenaRows

    arena, computed = ArenaRows(1024), 0
    digests = [os.urandom(16) for _ in range(pictures)]
    for number in range(requests):
        slot = arena.hold(digests[number % pictures], 64)
        assert slot is not None
        computed += slot[1]
        arena.release(digests[number % pictures])
    return computed


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.models.build import ModelBuild
    from cairn.models.vision.tower import Tower
    from cairn.models.weights import fill_random

    bench.step("tokens by size")
    sides = (224, 448, 896, 1792)
    tokens = [(float(side), float(tokens_of(side))) for side in sides]
    tower = Tower(SPEC, ModelBuild("meta", torch.float32, fused=False))
    fill_random(tower, tower.slots(), torch.device("cpu"), 0)
    small, large = (112, 448)
    bench.step("FLOPs of the tower")
    counted = [counted_flops(tower, side) for side in (small, large)]
    formula = [tower_flops(SPEC, (side // PATCH) ** 2) for side in (small, large)]
    return Outcome(
        checks=_checks(dict(tokens), counted, formula),
        plots=[
            Plot(
                title=Words("Tokens of a square picture", "正方形图片的 token 数"),
                x=Words("pixels along a side", "边长（像素）"),
                y=Words("tokens", "token 数"),
                lines={"rules": tokens},
                log_x=True,
                log_y=True,
            )
        ],
        table=Table(
            columns=[
                Words("pixels along a side", "边长（像素）"),
                Words("tokens", "token 数"),
                Words("patches", "patch 数"),
                Words("GFLOPs of this tower", "这个视觉塔的 GFLOP"),
            ],
            rows=[
                [
                    side,
                    tokens_of(side),
                    4 * tokens_of(side),
                    tower_flops(SPEC, 4 * tokens_of(side)) / 1e9,
                ]
                for side in sides
            ],
        ),
    )


def _checks(tokens: dict[float, float], counted: list[int], formula: list[int]) -> list[Check]:
    return [
        Check(
            what=Words(
                "tokens of 896 x 896 pixels, 28 a token",
                "896×896 像素、每 28 像素一个 token 时的 token 数",
            ),
            predicted=(896 / CELL) ** 2,
            measured=tokens[896.0],
            unit="tokens",
            within=1e-9,
        ),
        Check(
            what=Words("tokens when the side is doubled", "边长加倍后的 token 倍数"),
            predicted=4.0,
            measured=tokens[1792.0] / tokens[896.0],
            unit="x",
            within=1e-9,
        ),
        Check(
            what=Words("FLOPs of the tower, as torch counts them", "torch 统计的视觉塔 FLOP"),
            predicted=formula[1] / 1e9,
            measured=counted[1] / 1e9,
            unit="GFLOP",
            within=0.02,
        ),
        Check(
            what=Words(
                "FLOPs of a picture with 16 times the patches, over 16",
                "patch 数 16 倍时的 FLOP 除以 16",
            ),
            predicted=formula[1] / formula[0] / 16,
            measured=counted[1] / counted[0] / 16,
            unit="x",
            within=0.02,
        ),
        Check(
            what=Words(
                "pictures computed for 12 requests that show 3",
                "12 个请求共 3 张图时真正计算的图片数",
            ),
            predicted=3,
            measured=towers_work(12, 3),
            unit="pictures",
        ),
    ]


LAB = described(__file__, run)
