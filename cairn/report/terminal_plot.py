"""Plots in a terminal: a mark for each point, dots between them, round numbers on the axes. Plain text.

      1000 ┤            ╭ roofline        * measured
           │      ...o....o
       100 ┤  .o..   *
           │o..  *
        10 ┤ *
           └──────────────────
            1      10     100

The marks differ in shape and not only in colour, so that a log or a colour-blind reader sees the same. Knows nothing
about what it shows; needs only the standard library.
"""

import itertools
from collections.abc import Mapping, Sequence

from cairn.report.plot import Scale, axes, drawable, number

Point = tuple[float, float]

MARKS = "o*x+#@%&"
WIDTH, HEIGHT = 64, 15
BETWEEN, LIMIT = "·", "╌"


def draw(
    lines: Mapping[str, Sequence[Point]],
    *,
    log_x: bool = False,
    log_y: bool = False,
    limit: tuple[str, float] | None = None,
    width: int = WIDTH,
    height: int = HEIGHT,
) -> list[str]:
    """The lines of text: the legend first, then the plot, then the numbers below the x axis."""
    shown = {name: drawable(points, log_x, log_y) for name, points in lines.items()}
    if not any(shown.values()):
        return ["(no points)"]
    across, down, x_ticks, y_ticks = axes(
        shown.values(), (0, width - 1), (height - 1, 0), log_x=log_x, log_y=log_y, limit=limit
    )
    paper = [[" "] * width for _ in range(height)]
    if limit is not None and y_ticks[0] <= limit[1] <= y_ticks[-1]:
        paper[round(down(limit[1]))] = [LIMIT] * width
    places = [[(across(x), down(y)) for x, y in points] for points in shown.values()]
    for line in places:
        _connect(paper, line)
    for place, line in reversed(list(enumerate(places))):  # the first line lies on top
        for x, y in line:
            paper[round(y)][round(x)] = MARKS[place % len(MARKS)]
    margin = max(len(number(value)) for value in y_ticks)
    below = " " * (margin + 2) + _below(across, x_ticks)
    return [_legend(shown, limit), *_framed(paper, down, y_ticks, margin), below]


def _framed(
    paper: list[list[str]], down: Scale, y_ticks: Sequence[float], margin: int
) -> list[str]:
    labels: dict[int, str] = {}
    for value in y_ticks:
        labels.setdefault(round(down(value)), number(value))
    rows = [
        f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}{''.join(cells).rstrip()}"
        for row, cells in enumerate(paper)
    ]
    return [*rows, f"{' ' * margin} └{'─' * len(paper[0])}"]


def _connect(paper: list[list[str]], line: Sequence[Point]) -> None:
    for (x1, y1), (x2, y2) in itertools.pairwise(line):
        steps = max(1, round(max(abs(x2 - x1), abs(y2 - y1))))
        for step in range(1, steps):
            share = step / steps
            row, column = round(y1 + share * (y2 - y1)), round(x1 + share * (x2 - x1))
            paper[row][column] = BETWEEN


def _legend(shown: Mapping[str, object], limit: tuple[str, float] | None) -> str:
    parts = [f"{MARKS[place % len(MARKS)]} {name}" for place, name in enumerate(shown)]
    if limit is not None:
        parts.append(f"{LIMIT}{LIMIT} {limit[0]} ({number(limit[1])})")
    return "  ".join(parts)


def _below(across: Scale, x_ticks: Sequence[float]) -> str:
    """The numbers of the x axis, as many as fit."""
    text, free = "", 0
    for value in x_ticks:
        label = number(value)
        begin = max(round(across(value)) - len(label) // 2, 0)
        if begin >= free:
            text = text.ljust(begin) + label
            free = len(text) + 2
    return text
