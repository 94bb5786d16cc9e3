"""Several small whole numbers in one 32-bit word, the lowest bits first, dense across words: how 4-bit formats store.

8 values of 4 bits are one word; 32 values of 3 bits are three words, and some of them lie in two.
"""

import torch
from torch import Tensor

WORD = 32  # bits


def unpacked(words_RW: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` values of each row of words, as uint8 [R, count]."""
    if WORD % bits == 0:
        shifts = torch.arange(0, WORD, bits, device=words_RW.device, dtype=torch.int32)
        values_RWV = words_RW[..., None] >> shifts & ((1 << bits) - 1)
        return values_RWV.to(torch.uint8).flatten(1)[:, :count]
    first = torch.arange(count, device=words_RW.device) * bits
    words = words_RW.long() & 0xFFFFFFFF
    words = torch.cat((words, words.new_zeros(len(words), 1)), 1)
    both = words[:, first // WORD] | words[:, first // WORD + 1] << WORD
    return (both >> first % WORD & ((1 << bits) - 1)).to(torch.uint8)


def words_for(count: int, bits: int) -> int:
    """Words that hold so many values."""
    return -(-count * bits // WORD)


def nibbles(bytes_RH: Tensor) -> Tensor:
    """Two values to a byte, the first in the low half: uint8 [R, 2 * H]."""
    return torch.stack((bytes_RH & 15, bytes_RH >> 4), -1).flatten(1)
