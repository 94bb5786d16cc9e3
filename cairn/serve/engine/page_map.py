"""The pages of a cache as a line of characters, for somebody who watches.

    holders   0 2 1 0 0 0 | 0 0 0 0 0 0 | ...        cells of equal size, in the order of the pages' ids
    cell      '4'           'c' or '.'

A digit says how much of a cell requests hold: '0' up to a tenth, '9' more than nine tenths. Of a cell that nobody
holds, 'c' says that at least half of it still has a prefix that may be found, '.' that it does not. Pure; reads lists
that another thread changes, so a character may be a step old.
"""

from collections.abc import Sequence
from itertools import pairwise

from cairn.serve.engine.block_manager import BlockManager

MOST_CELLS = 512
TENTHS = 10


def map_of(blocks: BlockManager, cells: int = MOST_CELLS) -> str:
    """Of all pages but the null page 0."""
    return page_map(blocks._holders[1:], blocks.prefix._entry_of[1:], cells)


def page_map(holders: Sequence[int], entries: Sequence[object], cells: int = MOST_CELLS) -> str:
    """`holders`: how many requests hold a page; `entries`: None where no prefix can be found."""
    pages = len(holders)
    cells = min(cells, pages)
    edges = [pages * cell // cells for cell in range(cells + 1)] if cells else [0]
    return "".join(_cell(holders[start:end], entries[start:end]) for start, end in pairwise(edges))


def _cell(holders: Sequence[int], entries: Sequence[object]) -> str:
    size = len(holders)
    held = size - holders.count(0)
    if held:
        return str((held * TENTHS - 1) // size)
    findable = size - entries.count(None)
    return "c" if 2 * findable >= size else "."
