"""A lesson is complete in both languages, shows code that exists, and its papers can be found."""

import re
from collections import Counter
from pathlib import Path

import pytest

from cairn.cli.learn.learn_show import wrapped
from cairn.cli.main import main
from cairn.labs.catalogue import all_labs
from cairn.labs.coverage import coverage, read_lines
from cairn.labs.lesson import lessons, reading_of, snippet_of
from cairn.labs.roadmap import load

LINES = Path(__file__).with_name("roadmap_lines.txt")
CHINESE = re.compile(r"[\u4e00-\u9fff]")
# "Title (Authors, 2024), arXiv:2401.00001", or "Title, part (Publisher, 2025), where".
PAPER = re.compile(r"^.{3,} \([^()]*[^\W\d][^()]*, (19|20)\d\d\), \S+")
NO_AUTHOR = re.compile(r"\([^()]*edition, \d{4}\)")


@pytest.mark.parametrize("topic", sorted(lessons()))
def test_a_lesson_is_complete(topic):
    lesson = lessons()[topic]
    assert topic in load().topics
    assert len(lesson.picture.strip().splitlines()) >= 4
    assert max(len(line) for line in lesson.picture.splitlines()) <= 140
    assert len(lesson.mistakes) >= 3
    assert len(re.findall(r"\d", lesson.worked.en)) >= 10  # a worked number has numbers
    for words in (lesson.worked, *lesson.mistakes, *(a.ask for a in lesson.interview)):
        assert not CHINESE.search(words.en)
        assert CHINESE.search(words.zh)
    shown = snippet_of(lesson)
    assert len(shown.lines) >= 3
    assert lesson.snippet.partition(":")[0] in shown.place
    assert len(lesson.reading) >= 2


def test_all_reading_has_authors_a_year_and_a_place():
    """What lessons, topics and labs name can be found: an arXiv number, a venue, or the address of a document."""
    lists = [
        *(lesson.reading for lesson in lessons().values()),
        *(topic.reading for topic in load().topics.values()),
        *(lab.reading for lab in all_labs().values()),
    ]
    assert {one for reading in lists for one in reading if not PAPER.match(one)} == set()
    assert {one for reading in lists for one in reading if NO_AUTHOR.search(one)} == set()
    numbered = {one for reading in lists for one in reading if "arXiv:" in one}
    written = Counter(one.rpartition("arXiv:")[2] for one in numbered)
    assert [number for number, ways in written.items() if ways > 1] == []  # one paper, one citation


def test_no_two_lessons_ask_the_same():
    asked = Counter(one.ask.en for lesson in lessons().values() for one in lesson.interview)
    assert [ask for ask, count in asked.items() if count > 1] == []


def test_a_lesson_is_shown_with_its_code(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CAIRN_DATA", str(tmp_path))
    for language, heading in (("en", "Worked out"), ("zh", "推导与算例")):
        assert main(["learn", "flash-attention", "--lang", language]) == 0
        shown = capsys.readouterr().out
        assert heading in shown
        assert "| def attention_reference(" in shown
        assert "arXiv:2205.14135" in shown


def test_a_paper_is_listed_once_with_its_authors():
    lesson = lessons()["occupancy"]
    listed = reading_of(["Better Performance at Lower Occupancy (2010)", "A book (1999)"], lesson)
    assert listed == ["A book (1999)", *lesson.reading]
    assert reading_of(["A book (1999)"], None) == ["A book (1999)"]


def test_a_chinese_line_does_not_break_a_number(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    text = "每个寄存器占 2,304 个单位，共 65,536 个。"
    lines = wrapped(text, "")
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert [line for line in lines if line != line.rstrip()] == []
    assert {"2,304", "65,536"} <= {word for line in lines for word in re.findall(r"[\d,]+", line)}


def test_every_line_of_the_roadmap_has_text_code_and_a_lab():
    rows = coverage(list(read_lines(LINES.read_text(encoding="utf-8"))))
    assert len(rows) > 200
    assert {row.line: row.lacks for row in rows if row.lacks} == {}


def test_a_line_that_nothing_covers_is_found():
    lines = list(read_lines("quantum annealing of llamas\nroofline | flux capacitor"))
    absent, half = coverage(lines)
    assert "text" in absent.lacks
    assert half.lacks == ["'flux capacitor'"]
