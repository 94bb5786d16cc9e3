"""A plot in a terminal keeps within its paper, marks every line, and says its limit."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.report.terminal_plot import BETWEEN, LIMIT, MARKS, draw

values = st.floats(-1e6, 1e6).map(lambda value: 0.0 if abs(value) < 1e-6 else value)
points = st.lists(st.tuples(values, values), max_size=12)


@given(
    st.lists(points, min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.none() | values,
)
def test_it_stays_on_its_paper(lines, log_x, log_y, limit):
    named = {f"line {place}": line for place, line in enumerate(lines)}
    drawn = draw(
        named,
        log_x=log_x,
        log_y=log_y,
        limit=("top", limit) if limit is not None else None,
        width=30,
        height=8,
    )
    if drawn == ["(no points)"]:
        return
    _, *rows, edge, below = drawn
    assert len(rows) == 8
    margin = edge.index("└")
    assert edge == " " * margin + "└" + "─" * 30
    assert all(row[margin] in "┤│" and len(row) <= margin + 31 for row in rows)
    assert len(below) <= margin + 1 + 30 + 8
    assert set("".join(row[margin + 1 :] for row in rows)) <= {*MARKS, BETWEEN, LIMIT, " "}


def test_a_straight_line_on_logarithmic_axes_is_straight():
    drawn = draw(
        {"x": [(10**n, 10**n) for n in range(5)]}, log_x=True, log_y=True, width=41, height=9
    )
    rows = [row for row in drawn[1:] if MARKS[0] in row]
    columns = [row.index(MARKS[0]) for row in rows]
    assert len({a - b for a, b in itertools.pairwise(columns)}) == 1
    assert len(rows) == 5


def test_every_line_has_its_own_mark_and_the_limit_is_said():
    drawn = draw({"a": [(0, 1), (1, 2)], "b": [(0, 3), (1, 4)]}, limit=("peak", 4.5))
    assert drawn[0] == "o a  * b  ╌╌ peak (4.5)"
    text = "".join(drawn[1:])
    assert text.count("o") == text.count("*") == 2
    assert LIMIT in text


@pytest.mark.parametrize("lines", [{}, {"a": []}, {"a": [(0.0, float("nan"))]}])
def test_nothing_to_draw_is_said(lines):
    assert draw(lines) == ["(no points)"]
