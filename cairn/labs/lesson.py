"""The lesson of a topic: a picture, a worked number, code to read, common mistakes, two questions, papers.

    lessons/TOPIC.toml  ──lesson_of(topic)──>  Lesson, or None where a topic has only its short text

The code is shown from the source itself, so that a lesson cannot show what the project no longer does. A paper is
written "Title (Authors, Year), arXiv:NNNN.NNNNN" or ends with the place where it is found. Both languages are complete.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from cairn.labs.code_location import ROOT, Place, find_place
from cairn.labs.lab import Words
from cairn.labs.rubric import Point

FOLDER = Path(__file__).parent / "lessons"
MOST_LINES = 28  # of a snippet


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question of an interview, with the facts that a good answer has."""

    ask: Words
    answer: Words
    points: list[Point]


class Lesson(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    picture: str  # text that needs no translation: names of the field, arrows, numbers
    worked: Words  # a derivation, or an example with its numbers
    snippet: str  # "cairn/kernels/norm/rmsnorm.py:rmsnorm_reference"
    mistakes: list[Words]
    interview: tuple[Asked, Asked]
    reading: list[str]


class Snippet(msgspec.Struct, frozen=True):
    place: str  # "cairn/x.py:12  name"
    lines: list[str]


@cache
def lessons() -> dict[str, Lesson]:
    """Every lesson, by topic."""
    return {file.stem: _read(file) for file in sorted(FOLDER.glob("*.toml"))}


def lesson_of(topic: str) -> Lesson | None:
    """Reads that lesson alone: all of them take a second, and a page shows one."""
    file = FOLDER / f"{topic}.toml"
    return _read(file) if file.exists() else None


def reading_of(titles: Sequence[str], lesson: Lesson | None) -> list[str]:
    """A topic's own titles, less those that its lesson names with authors and place, and then the lesson's."""
    full = [] if lesson is None else lesson.reading
    names = [title.casefold() for title in full]
    own = [
        title
        for title in titles
        if not any(name.startswith(title.partition(" (")[0].casefold()) for name in names)
    ]
    return [*own, *full]


def snippet_of(lesson: Lesson) -> Snippet:
    """The code that does it, from its first line to the end of what is named there."""
    place = find_place(lesson.snippet)
    lines = (ROOT / place.path).read_text(encoding="utf-8").splitlines()
    end = _end(lines, place)
    last = min(end, place.line - 1 + MOST_LINES)
    excerpt = lines[place.line - 1 : last]
    while excerpt and not excerpt[-1].strip():
        excerpt.pop()
    if last < end:
        excerpt.append(f"    ... {end - last} more lines")
    return Snippet(str(place), excerpt)


def _end(lines: list[str], place: Place) -> int:
    """Behind the last line that is indented deeper than the first; a whole file ends where it ends."""
    if not place.name:
        return len(lines)
    first = lines[place.line - 1]
    depth = len(first) - len(first.lstrip())
    for number in range(place.line, len(lines)):
        line = lines[number]
        closes = line.lstrip().startswith((")", "]", "}"))
        if line.strip() and len(line) - len(line.lstrip()) <= depth and not closes:
            return number
    return len(lines)


@cache
def _read(file: Path) -> Lesson:
    try:
        return msgspec.toml.decode(file.read_bytes(), type=Lesson)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file.name}: {error}") from error
