"""Rows of text in columns that line up: words to the left, numbers to the right. Never cut.

    wide enough                          narrower: words fold         narrower still: words below the numbers
    layout    MFU  verdict               layout    MFU  verdict       layout    MFU
    fsdp 8  59.5%  as fast, and simple   fsdp 8  59.5%  as fast,        verdict
                                                        and simple    fsdp 8  59.5%
                                                                        as fast, and simple
    more numbers than fit: several tables, each with the first column

Only a terminal is narrow: a file or a pipe gets every row on one line.
"""

import shutil
import sys
from collections.abc import Collection, Sequence

LEAST = 16  # cells of a column of words that is folded
GAP = "  "


def lines(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Collection[int] | None = None,
    width: int | None = None,
) -> list[str]:
    """`left`: the columns of words; None: the first, and those with sentences.

    `width`: how many cells there are; None: those of the terminal, and any number where there is none.
    """
    from rich.cells import cell_len  # a Chinese character is two cells wide

    table = [list(headings), *map(list, rows)]
    widths = [max(cell_len(row[place]) for row in table) for place in range(len(headings))]
    words = set(_sentences(rows, len(headings)) if left is None else left)
    room = width or (shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize)
    if sum(widths) + len(GAP) * (len(widths) - 1) <= room:
        return [_row(row, widths, words) for row in table]
    numbers = sum(size for place, size in enumerate(widths) if place not in words)
    if numbers + len(GAP) * (len(widths) - len(words)) > room:
        return _cut(table, widths, words, room)
    for_words = room - numbers - len(GAP) * (len(widths) - 1)
    if for_words >= LEAST * len(words):
        widths = _narrowed(widths, words, for_words)
        return [line for row in table for line in _folded(row, widths, words)]
    return [line for row in table for line in _stacked(row, widths, words, room)]


def _cut(
    table: list[list[str]], widths: Sequence[int], words: Collection[int], room: int
) -> list[str]:
    """Tables below one another, each with the first column and as many others as fit."""
    parts, used = [[0]], widths[0]
    for place in range(1, len(widths)):
        needed = len(GAP) + (LEAST if place in words else widths[place])
        if used + needed > room and len(parts[-1]) > 1:
            parts.append([0])
            used = widths[0]
        parts[-1].append(place)
        used += needed
    found: list[str] = []
    for part in parts:
        headings, *rows = [[row[place] for place in part] for row in table]
        left = [at for at, place in enumerate(part) if place in words]
        found += ([""] if found else []) + lines(headings, rows, left, room)
    return found


def _row(row: Sequence[str], widths: Sequence[int], words: Collection[int]) -> str:
    from rich.cells import cell_len

    def padded(cell: str, place: int) -> str:
        space = " " * (widths[place] - cell_len(cell))
        return cell + space if place in words else space + cell

    return GAP.join(padded(cell, at) for at, cell in enumerate(row)).rstrip()


def _narrowed(widths: Sequence[int], words: Collection[int], room: int) -> list[int]:
    """The widest columns of words give until all of them fit."""
    found = list(widths)
    while sum(found[place] for place in words) > room:
        widest = max(words, key=lambda place: found[place])
        found[widest] -= 1
    return found


def _folded(row: Sequence[str], widths: Sequence[int], words: Collection[int]) -> list[str]:
    cells = [_wrapped(cell, widths[at]) if at in words else [cell] for at, cell in enumerate(row)]
    height = max(map(len, cells))
    return [
        _row([cell[at] if at < len(cell) else "" for cell in cells], widths, words)
        for at in range(height)
    ]


def _stacked(
    row: Sequence[str], widths: Sequence[int], words: Collection[int], room: int
) -> list[str]:
    """The first words, the numbers behind or below them, and then all other words."""
    numbers = [place for place in range(len(row)) if place not in words]
    first, *others = sorted(words)
    if sum(widths[place] for place in (first, *numbers)) + len(GAP) * len(numbers) <= room:
        beside = [first, *numbers]
        aligned = _row([row[place] for place in beside], [widths[place] for place in beside], (0,))
        below = [line for place in others for line in _wrapped(row[place], room - len(GAP))]
        return [aligned, *(f"{GAP}{part}" for part in below if part)]
    aligned = _row([row[place] for place in numbers], [widths[place] for place in numbers], ())
    below = [line for place in others for line in _wrapped(row[place], room - len(GAP))]
    parts = [aligned, *below] if numbers else below
    return [*_wrapped(row[first], room), *(f"{GAP}{part}" for part in parts if part)]


def _wrapped(text: str, width: int) -> list[str]:
    import io

    from rich.console import Console
    from rich.text import Text

    console = Console(file=io.StringIO(), width=width)
    return [str(line).rstrip() for line in Text(text).wrap(console, width)] or [""]


def _sentences(rows: Sequence[Sequence[str]], places: int) -> set[int]:
    return {0} | {place for place in range(places) if any(" " in row[place][8:] for row in rows)}
