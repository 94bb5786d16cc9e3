"""Does the course have what a roadmap asks for? Each of its lines, looked for in the files and not in a declaration.

    python -m cairn.labs.coverage LINES        "topic | term; term; ..." on each line

    text      the topic whose title, texts, lesson and labs have the line's words
    practice  code that exists or an exercise     ─┐ found through the topic: files that are there
    proof     a lab, or evidence to diagnose       ─┘

A term counts as written when its words stand in the text of that topic, or of another one of its section. Reads the
course's own data; writes nothing.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec

from cairn.labs.catalogue import all_labs
from cairn.labs.exercises.exercise import exercises_of
from cairn.labs.interview import rounds
from cairn.labs.lesson import lesson_of
from cairn.labs.roadmap import Topic, load

ENOUGH = 0.6  # of a line's words
SMALL = {"a", "an", "and", "of", "in", "the", "to", "on", "with", "by", "for", "what", "do", "or"}
SMALL |= {"as", "is", "it", "we", "us", "are", "per", "each", "where", "over", "from", "path"}


class Line(msgspec.Struct, frozen=True):
    topic: str
    terms: list[str]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What was found for one line."""

    line: str
    topic: str  # "" where none has its words
    unwritten: list[str]  # terms that no text of the section has
    practice: int  # places in the code, and exercises
    proof: int  # labs, and drills with evidence

    @property
    def lacks(self) -> list[str]:
        missing = [] if self.topic else ["text"]
        missing += [] if self.practice else ["code or exercise"]
        missing += [] if self.proof else ["lab or drill"]
        return [*missing, *(f"'{term}'" for term in self.unwritten)]


def read_lines(text: str) -> Iterator[Line]:
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            topic, _, terms = line.partition("|")
            yield Line(topic.strip(), [one.strip() for one in terms.split(";") if one.strip()])


def coverage(lines: Sequence[Line]) -> list[Row]:
    return [_row(line) for line in lines]


def _row(line: Line) -> Row:
    topic = _best(line)
    if topic is None:
        return Row(line=line.topic, topic="", unwritten=line.terms, practice=0, proof=0)
    drills = [q for one in rounds().values() for q in one.question if q.evidence]
    unwritten = [term for term in line.terms if not _is_written(term, topic)]
    return Row(
        line=line.topic,
        topic=topic.id,
        unwritten=unwritten,
        practice=len(topic.code) + len(exercises_of(topic.id)),
        proof=len(topic.labs) + sum(drill.topic == topic.id for drill in drills),
    )


def _best(line: Line) -> Topic | None:
    """The topic of that name, or the one with most of the line's words: in its text, its title, then of its terms."""
    if line.topic in load().topics:
        return load().topics[line.topic]
    topic_words, term_words = words_of(line.topic), words_of(" ".join(line.terms))

    def score(topic: Topic) -> tuple[float, float, float]:
        text_words = words_of(topic_text(topic.id))
        title = words_of(f"{topic.id} {topic.en.title}")
        return (
            _share(topic_words, text_words),
            _share(topic_words, title),
            _share(term_words, text_words),
        )

    best = max(load().topics.values(), key=score)
    return best if score(best)[0] >= ENOUGH else None


def _is_written(term: str, topic: Topic) -> bool:
    term_words = words_of(term)
    near = (one for one in load().topics.values() if one.section == topic.section)
    return any(_share(term_words, words_of(topic_text(one.id))) >= ENOUGH for one in (topic, *near))


def _share(words: frozenset[str], text_words: frozenset[str]) -> float:
    return len(words & text_words) / len(words) if words else 1.0


@cache
def words_of(text: str) -> frozenset[str]:
    """Without plural endings and without words that say nothing."""
    all_words = re.findall(r"[a-z0-9]+", text.lower())
    telling = (word for word in all_words if word not in SMALL)
    return frozenset(
        word[:-1] if len(word) > 3 and word.endswith("s") else word for word in telling
    )


@cache
def topic_text(topic: str) -> str:
    """Everything in English that a learner of this topic reads."""
    one, lesson = load().topics[topic], lesson_of(topic)
    text = one.en
    parts = [topic, text.title, text.what, text.problem, text.debug, text.ask, text.answer]
    parts += one.commands
    for name in one.labs:
        lab = all_labs()[name]
        parts += [lab.title.en, lab.hypothesis.en, *(q.ask.en + q.answer.en for q in lab.questions)]
    if lesson is not None:
        parts += [lesson.picture, lesson.worked.en, *(m.en for m in lesson.mistakes)]
        parts += [f"{question.ask.en} {question.answer.en}" for question in lesson.interview]
    return " ".join([*parts, *one.reading])


if __name__ == "__main__":
    rows = coverage(list(read_lines(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    for row in rows:
        print(
            f"{row.line[:44]:<46}{row.topic:<28}{row.practice:>3}{row.proof:>3}  {', '.join(row.lacks)}"
        )
    missing = [row for row in rows if row.lacks]
    print(f"{len(rows)} lines, {len(missing)} with something missing")
    sys.exit(1 if missing else 0)
