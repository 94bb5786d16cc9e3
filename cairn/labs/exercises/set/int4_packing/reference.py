"""Four bits for each weight."""

import torch


def quantize(weight_ND: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed [N, D/2] uint8, scales [N, D/group]); the even column is the low nibble, values are q + 8."""
    # begin answer
    grouped = weight_ND.reshape(len(weight_ND), -1, group)
    scale = grouped.abs().amax(-1) / 7
    q = (grouped / scale.clamp(min=1e-12)[..., None]).round()
    return pack((q + 8).to(torch.uint8).reshape(weight_ND.shape)), scale
    # end answer


def pack(nibbles_ND: torch.Tensor) -> torch.Tensor:
    """Two numbers of 0..15 to a byte."""
    # begin answer
    low, high = nibbles_ND[:, 0::2], nibbles_ND[:, 1::2]
    return low | (high << 4)
    # end answer


def dequantize(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weights again, [N, D] in fp32."""
    # begin answer
    low, high = packed & 15, packed >> 4
    q_ND = torch.stack([low, high], -1).reshape(len(packed), -1).float() - 8
    group = q_ND.shape[1] // scale.shape[1]
    return q_ND * scale.repeat_interleave(group, 1)
    # end answer
