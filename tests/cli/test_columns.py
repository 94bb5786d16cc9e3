"""Tables line up, lose nothing, and fit a terminal of 80 columns."""

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from cairn.cli.columns import lines
from cairn.core.prose import folded, in_terminal

WORD = st.text("abcdefgh", min_size=1, max_size=12)
SENTENCE = st.lists(WORD, min_size=2, max_size=14).map(" ".join)
ROW = st.tuples(SENTENCE, st.integers(0, 10**6).map(str), st.integers(0, 99).map(str), SENTENCE)
HEADINGS = ["what", "tokens/s", "ms", "verdict"]


@given(st.lists(ROW, min_size=1, max_size=5), st.integers(40, 160))
def test_nothing_is_lost_and_nothing_is_wider_than_the_terminal(rows, width):
    found = lines(HEADINGS, rows, left=[0, 3], width=width)
    assert max(map(cell_len, found)) <= width
    words = [word for row in (HEADINGS, *rows) for cell in row for word in cell.split()]
    assert sorted(" ".join(found).split()) == sorted(words)


def test_a_wide_terminal_has_a_row_on_a_line():
    found = lines(
        ["layout", "MFU", "verdict"], [["fsdp 8, microbatch 4", "59.5%", "best"]], width=80
    )
    assert found == ["layout                  MFU  verdict", "fsdp 8, microbatch 4  59.5%     best"]


def test_words_fold_within_their_column_and_then_stand_above_and_below_the_numbers():
    row = ["fsdp 8", "59.5%", "slower: collectives of dp and fsdp are not hidden"]
    folded = lines(["layout", "MFU", "verdict"], [row], left=[0, 2], width=50)
    assert folded[1] == "fsdp 8  59.5%  slower: collectives of dp and fsdp"
    assert folded[2] == "               are not hidden"
    stacked = lines(["layout", "MFU", "verdict"], [row], left=[0, 2], width=30)
    assert stacked[2:] == [
        "fsdp 8  59.5%",
        "  slower: collectives of dp",
        "  and fsdp are not hidden",
    ]
    long = lines(["layout", "MFU"], [["fsdp 8, microbatch 4", "59.5%"]], left=[0], width=22)
    assert long[2:] == ["fsdp 8, microbatch 4", "  59.5%"]


@given(
    st.lists(st.integers(10**9, 10**10 - 1).map(str), min_size=6, max_size=15), st.integers(40, 60)
)
def test_more_numbers_than_fit_stand_in_several_tables(numbers, width):
    headings = ["policy", *(f"n{at}" for at in range(len(numbers)))]
    found = lines(headings, [["fifo", *numbers], ["sjf", *numbers]], width=width)
    assert max(map(cell_len, found)) <= width
    tables = "\n".join(found).split("\n\n")
    assert [line.split()[0] for one in tables for line in one.split("\n")] == [
        "policy",
        "fifo",
        "sjf",
    ] * len(tables)
    assert [cell for one in tables for cell in one.split("\n")[1].split()[1:]] == numbers


def test_chinese_characters_are_two_cells_wide():
    row = ["连续批处理与分页缓存的结论", "12", "与预测相差不大而且可以重复"]
    found = lines(["名称", "数", "结论"], [row], left=[0, 2], width=40)
    assert max(map(cell_len, found)) <= 40
    assert re.sub(r"\s", "", "".join(found)) != ""


def test_a_file_gets_every_row_on_one_line(capsys):
    row = ["a " * 80, "1"]
    assert len(lines(["x", "y"], [row])) == 2


@pytest.mark.parametrize("width", [40, 80])
def test_a_line_of_a_report_is_as_wide_as_the_terminal(width, monkeypatch):
    """Chinese letters are two cells wide, and an indent of half the terminal or more is given up."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    chinese = "○ cpp-operator      90 min  为 PyTorch 写 C++ 算子：用 cpp_extension 编译融合的算子，再用 torch 检验。"
    english = "○ online-softmax    40 min  Online softmax: one pass over the keys, any block size, as wide as it may be"
    for text in (chinese, english):
        folded = in_terminal(text, " " * 28)
        assert max(map(cell_len, folded.splitlines())) <= width
        assert "".join(folded.split()) == "".join(text.split())
    assert all("，。：".find(line.strip()[0]) < 0 for line in in_terminal(chinese).splitlines())
    assert in_terminal("    two words") == "    two words"
    assert in_terminal("") == ""


def test_a_paragraph_of_help_is_folded_anew_and_a_list_is_left(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    text = "One line of source\nand the next of it.\n\nA list\n  stays  as it is"
    assert folded(text) == "One line of source\nand the next of it.\n\nA list\n  stays  as it is"
    monkeypatch.setenv("COLUMNS", "30")
    assert folded(text).splitlines()[:2] == ["One line of source and the", "next of it."]
