"""The pages of a cache as a line of characters, for the engine page.

    holders   0 2 1 0 0 0 | 0 0 0 0 0 0 | ...        cells of equal size, in the order of the pages' ids
    cell      '4'           'c' or '.'

A digit says how much of a cell requests hold: '0' up to a tenth, '9' more than nine tenths. Of a cell that no request
holds, 'c' says that at least half of it still has a prefix that may be found, '.' that it does not. Where layers keep
their keys in several cache groups, a second line has the number of the group that most of a cell's held pages are of.
Pure; reads lists that another thread changes, so a character may be a step old.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from cairn.serve.engine.block_manager import BlockManager

MOST_CELLS = 512
TENTHS = 10


class PageMap(msgspec.Struct, frozen=True, array_like=True):
    held: str = ""  # one character for each cell
    groups: str = ""  # equally long, '.' where no page is held; empty: there is one cache group


def map_of(blocks: BlockManager, cells: int = MOST_CELLS) -> PageMap:
    """Map of all blocks except the null block 0."""
    holders = blocks.pool.holders[1:]
    cell_text = page_map(holders, blocks.prefix._entry_of[1:], cells)
    if len(blocks.groups) == 1:
        return PageMap(cell_text)
    return PageMap(cell_text, group_map(holders, blocks.pool.group_of[1:], cells))


def page_map(holders: Sequence[int], entries: Sequence[object], cells: int = MOST_CELLS) -> str:
    """`holders`: how many requests hold a page; `entries`: None where no prefix can be found."""
    bounds = _bounds(len(holders), cells)
    return "".join(_cell(holders[start:end], entries[start:end]) for start, end in bounds)


def group_map(holders: Sequence[int], groups: Sequence[int], cells: int = MOST_CELLS) -> str:
    """`groups`: of each page, the cache group that it was last taken for."""
    return "".join(
        _group(holders[start:end], groups[start:end]) for start, end in _bounds(len(holders), cells)
    )


def _bounds(pages: int, cells: int) -> Iterator[tuple[int, int]]:
    cells = min(cells, pages)
    return pairwise([pages * cell // cells for cell in range(cells + 1)] if cells else [0])


def _group(holders: Sequence[int], groups: Sequence[int]) -> str:
    counts = Counter(group for count, group in zip(holders, groups, strict=True) if count)
    return str(counts.most_common(1)[0][0]) if counts else "."


def _cell(holders: Sequence[int], entries: Sequence[object]) -> str:
    size = len(holders)
    used = size - holders.count(0)
    if used:
        return str((used * TENTHS - 1) // size)
    findable = size - entries.count(None)
    return "c" if 2 * findable >= size else "."
