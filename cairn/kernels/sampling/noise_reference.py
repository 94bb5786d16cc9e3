"""Noise for sampling as `sampling_noise` defines it, in torch: what the kernel is held against, and a CPU computes."""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def noise_reference(seed_B: Tensor, position_B: Tensor, vocabulary: int) -> Tensor:
    """[B, V] in float64."""
    x, y, z = (
        part * 1664525 + 1013904223 & _WORD
        for part in (seed_B >> 32 & _WORD, position_B.long() & _WORD, seed_B & _WORD)
    )
    for last in (False, True):
        x = x + y * z & _WORD
        y = y + z * x & _WORD
        z = z + x * y & _WORD
        if not last:
            x, y, z = x ^ x >> 16, y ^ y >> 16, z ^ z >> 16
    token_V = torch.arange(vocabulary, device=seed_B.device)[None, :]
    word_BV = token_V * 0x9E3779B1 + y[:, None] & _WORD
    word_BV = (word_BV ^ word_BV >> 15 ^ z[:, None]) * 0x7FEB352D & _WORD
    word_BV = (word_BV ^ word_BV >> 16) * 0x846CA68B & _WORD
    word_BV = word_BV ^ word_BV >> 16
    return -torch.log(-torch.log1p(-(word_BV.double() + 0.5) / 2**32))
