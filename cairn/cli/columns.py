"""Rows of text in columns that line up: words to the left, numbers to the right. Never folded, never cut."""

from collections.abc import Collection, Sequence


def lines(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Collection[int] | None = None,
) -> list[str]:
    """`left`: the columns of words; None: the first, and those in which somebody wrote a sentence."""
    from rich.cells import cell_len  # a Chinese character is two cells wide

    table = [list(headings), *map(list, rows)]
    widths = [max(cell_len(row[place]) for row in table) for place in range(len(headings))]
    words = _sentences(rows, len(headings)) if left is None else left

    def padded(cell: str, place: int) -> str:
        space = " " * (widths[place] - cell_len(cell))
        return cell + space if place in words else space + cell

    return ["  ".join(padded(cell, at) for at, cell in enumerate(row)).rstrip() for row in table]


def _sentences(rows: Sequence[Sequence[str]], places: int) -> set[int]:
    return {0} | {place for place in range(places) if any(" " in row[place][8:] for row in rows)}
