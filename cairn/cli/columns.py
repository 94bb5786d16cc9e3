"""Rows of text in columns that line up: words to the left, numbers to the right. Never folded, never cut."""

from collections.abc import Sequence


def lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    table = [list(headings), *map(list, rows)]
    widths = [max(len(row[place]) for row in table) for place in range(len(headings))]
    words = {place for place in range(len(headings)) if any(" " in row[place][8:] for row in rows)}
    return [
        "  ".join(
            cell.ljust(width) if place == 0 or place in words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
