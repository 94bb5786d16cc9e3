"""Checksums of memory: the sum of its 64-bit words, which every single flipped bit changes, at the speed of memory."""

from typing import Any

import numpy as np

Buffer = bytes | bytearray | memoryview


def word_sum(data: Buffer) -> int:
    whole = len(data) // 8 * 8
    words: Any = np.frombuffer(data[:whole], np.uint64)
    tail = int.from_bytes(data[whole:], "little")
    return (int(np.add.reduce(words, dtype=np.uint64)) + tail) & (2**64 - 1)


def part_sums(data: Buffer, cuts: list[int]) -> list[int]:
    """Checksums of the parts that begin at the cuts; the last part ends with the data."""
    ends = [*cuts[1:], len(data)]
    return [word_sum(data[begin:end]) for begin, end in zip(cuts, ends, strict=True)]
