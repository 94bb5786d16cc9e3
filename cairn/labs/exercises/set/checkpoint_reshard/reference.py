"""From slices of n ranks to slices of m."""

from typing import NamedTuple


class Read(NamedTuple):
    source: int  # whose file
    offset: int  # of the first number in that file
    length: int
    target_offset: int  # where it goes in the reader's slice


def bounds(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """What a rank holds of a tensor of `size` numbers."""
    # begin answer
    return rank * size // ranks, (rank + 1) * size // ranks
    # end answer


def plan(size: int, saved: int, rank: int, ranks: int) -> list[Read]:
    """What `rank` of `ranks` reads from the files of `saved` ranks, in order."""
    # begin answer
    t_begin, t_end = bounds(size, rank, ranks)
    reads = []
    for source in range(saved):
        s_begin, s_end = bounds(size, source, saved)
        low, high = max(t_begin, s_begin), min(t_end, s_end)
        if low < high:
            reads.append(Read(source, low - s_begin, high - low, low - t_begin))
    return reads
    # end answer
