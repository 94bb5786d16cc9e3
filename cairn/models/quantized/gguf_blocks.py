"""Blocks of ggml as canonical planes: what a GGUF file stores row by row, with the same numbers.

    Q4_0 Q4_1 Q4_K               4-bit levels with a scale and a shift for 32 values
    Q5_0 Q5_1 Q5_K Q6_K Q8_0     8-bit levels; Q6_K has a scale for 16 values, the others for 32

A block is a run of bytes: half-precision scales, then levels in pieces of 4, 2 and 1 bits. Other types have no planes
and are dequantised when they are loaded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cairn.models.quantized.planes import Planes

# Levels [B, E] of B blocks of E values, scales [B, G], shifts [B, G] or None
Read = tuple[Tensor, Tensor, Tensor | None]
K_GROUPS = 8  # of 32 values in a block of Q4_K or Q5_K


def block_planes(raw_NC: Tensor, block: str, size_bytes: int) -> Planes:
    """Rows of whole blocks, as bytes [N, C]."""
    rows = len(raw_NC)
    levels, scales, shifts = BLOCKS[block](raw_NC.reshape(-1, size_bytes))
    group = levels.shape[1] // scales.shape[1]
    return Planes(
        "int4" if levels.dtype == torch.uint8 else "int8",
        levels.reshape(rows, -1),
        scales.reshape(rows, -1),
        None if shifts is None else shifts.reshape(rows, -1),
        group,
    )


def _q4_0(raw_BC: Tensor) -> Read:
    scale_B1 = _half(raw_BC[:, 0:2])
    return _halves(raw_BC[:, 2:]), scale_B1, -8 * scale_B1


def _q4_1(raw_BC: Tensor) -> Read:
    return _halves(raw_BC[:, 4:]), _half(raw_BC[:, 0:2]), _half(raw_BC[:, 2:4])


def _q5_0(raw_BC: Tensor) -> Read:
    five_BE = _halves(raw_BC[:, 6:]) | _bits(raw_BC[:, 2:6]) << 4
    return (five_BE.short() - 16).to(torch.int8), _half(raw_BC[:, 0:2]), None


def _q5_1(raw_BC: Tensor) -> Read:
    five_BE = _halves(raw_BC[:, 8:]) | _bits(raw_BC[:, 4:8]) << 4
    return five_BE.to(torch.int8), _half(raw_BC[:, 0:2]), _half(raw_BC[:, 2:4])


def _q8_0(raw_BC: Tensor) -> Read:
    return raw_BC[:, 2:].contiguous().view(torch.int8), _half(raw_BC[:, 0:2]), None


def _q4_k(raw_BC: Tensor) -> Read:
    scales_BG, shifts_BG = _k_scales(raw_BC)
    return _k_nibbles(raw_BC[:, 16:]), scales_BG, shifts_BG


def _q5_k(raw_BC: Tensor) -> Read:
    scales_BG, shifts_BG = _k_scales(raw_BC)
    # Bit g of byte i is the fifth bit of value i in group g.
    each_G1 = torch.arange(K_GROUPS, device=raw_BC.device, dtype=torch.uint8)[:, None]
    fifth_BE = (raw_BC[:, None, 16:48] >> each_G1 & 1).flatten(1)
    return (_k_nibbles(raw_BC[:, 48:]) | fifth_BE << 4).to(torch.int8), scales_BG, shifts_BG


def _q6_k(raw_BC: Tensor) -> Read:
    low_B2H, high_B2Q = (
        raw_BC[:, :128].unflatten(1, (2, 64)),
        raw_BC[:, 128:192].unflatten(1, (2, 32)),
    )
    low = torch.cat((low_B2H & 15, low_B2H >> 4), 2)  # of each half of the block: 128 values
    high = torch.cat([high_B2Q >> 2 * quarter & 3 for quarter in range(4)], 2)
    levels_BE = ((low | high << 4).flatten(1).short() - 32).to(torch.int8)
    own_BG = raw_BC[:, 192:208].contiguous().view(torch.int8).float()
    return levels_BE, _half(raw_BC[:, 208:210]) * own_BG, None


BLOCKS: dict[str, Callable[[Tensor], Read]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _half(raw_B2: Tensor) -> Tensor:
    return raw_B2.contiguous().view(torch.float16).float()


def _halves(raw_BH: Tensor) -> Tensor:
    """Low nibbles are the first half of the values, high nibbles the second."""
    return torch.cat((raw_BH & 15, raw_BH >> 4), 1)


def _bits(raw_B4: Tensor) -> Tensor:
    """32 values of one bit."""
    each = torch.arange(8, device=raw_B4.device, dtype=torch.uint8)
    return (raw_B4[..., None] >> each & 1).flatten(1)


def _k_nibbles(raw_BH: Tensor) -> Tensor:
    """Unpack nibbles: the low nibbles of each 32 bytes are one group, the high nibbles the next."""
    raw_BPV = raw_BH.unflatten(1, (K_GROUPS // 2, 32))
    return torch.cat((raw_BPV & 15, raw_BPV >> 4), 2).flatten(1)


def _k_scales(raw_BC: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and shifts of 8 groups from two halves and 12 bytes: 6 bits each, of the last four in two places."""
    first, second, mixed = raw_BC[:, 4:8], raw_BC[:, 8:12], raw_BC[:, 12:16]
    scales_BG = torch.cat((first & 63, mixed & 15 | (first >> 6) << 4), 1)
    minima_BG = torch.cat((second & 63, mixed >> 4 | (second >> 6) << 4), 1)
    return _half(raw_BC[:, 0:2]) * scales_BG, -(_half(raw_BC[:, 2:4]) * minima_BG)
