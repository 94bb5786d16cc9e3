"""Experts as gpt-oss stores them: MXFP4 blocks of all experts in one tensor, rows of gate and up alternating.

experts.gate_up_proj_blocks uint8 [E, 2I, H/32, 16], experts.gate_up_proj_scales uint8 [E, 2I, H/32]
experts.down_proj_blocks    uint8 [E, H, I/32, 16],  experts.down_proj_scales    uint8 [E, H, I/32]
"""

import torch
from torch import Tensor

from cairn.core.errors import WeightsError
from cairn.models.quantized.bit_packing import nibbles
from cairn.models.quantized.compressed_tensors import powers_of_two
from cairn.models.quantized.planes import Planes

GROUP = 32
# Rows of one of the parts that checkpoints of other families store apart.
PARTS = {
    "gate_proj": ("gate_up_proj", slice(0, None, 2)),
    "up_proj": ("gate_up_proj", slice(1, None, 2)),
    "down_proj": ("down_proj", slice(None)),
}


def check(name: str, blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int, int]:
    """Experts, rows and columns of what is stored, from the shapes of the two tensors."""
    if len(blocks) != 4 or blocks[3] != GROUP // 2 or blocks[:3] != scales:
        raise WeightsError(
            f"{name}_blocks has shape {list(blocks)} and {name}_scales {list(scales)}",
            hint="blocks of 16 bytes with one scale each are expected: the file is truncated or another format",
        )
    return blocks[0], blocks[1], blocks[2] * GROUP


def planes(blocks_RGB: Tensor, scales_RG: Tensor, name: str) -> Planes:
    """Planes of rows of an expert."""
    return Planes(
        "mxfp4", nibbles(blocks_RGB.flatten(1)), powers_of_two(scales_RG, name), None, GROUP
    )


def part_planes(
    blocks: Tensor, scales: Tensor, rows: slice, name: str, device: torch.device | str
) -> Planes:
    return planes(blocks[rows].to(device), scales[rows].to(device), name)
