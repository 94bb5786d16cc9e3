"""Exercises, the quiz, the interview, graded answers and source files as JSON documents for the page.

Both languages are in each. Reads the journal and source files of this package; decides nothing.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from cairn.labs.code_location import ROOT, find_place
from cairn.labs.exercises import journal
from cairn.labs.exercises.exercise import Exercise, all_exercises
from cairn.labs.interview import Drilled, Round
from cairn.labs.quiz import Typed
from cairn.labs.roadmap import load
from cairn.labs.rubric import Graded, grade_answer

SHOWN = (".py", ".c", ".cpp", ".cu", ".go", ".js", ".css", ".toml")  # suffixes of source files


def exercises_document() -> list[dict[str, Any]]:
    """All of them in order; `passed` is what the journal of this machine says."""
    passed = journal.passed(journal.read())
    courses = {course.id: {"en": course.en, "zh": course.zh} for course in load().map.course}
    return [
        {
            "name": one.name,
            "course": one.about.course,
            "course_title": courses[one.about.course],
            "minutes": one.about.minutes,
            "title": asdict(one.about.title),
            "passed": one.name in passed,
        }
        for one in all_exercises().values()
    ]


def exercise_document(one: Exercise) -> dict[str, Any]:
    """What a learner sees before writing; the reference is not in it."""
    about = one.about
    return {
        "name": one.name,
        "course": about.course,
        "minutes": about.minutes,
        "topics": about.topics,
        "title": asdict(about.title),
        "wanted": asdict(about.wanted),
        "hints": [asdict(hint) for hint in about.hints],
        "file": one.file_name,
        "skeleton": one.skeleton,
        "places": [str(find_place(written)) for written in about.solution],
    }


def interview_round(one: Round) -> dict[str, Any]:
    topics = [q.topic for q in one.question]
    return {
        "id": one.id,
        "title": asdict(one.title),
        "minutes": one.minutes,
        "wants": asdict(one.wants),
        "questions": [
            {
                "topic": q.topic,
                "number": topics[:place].count(q.topic),  # of those of its topic
                "ask": asdict(q.ask),
                "evidence": q.evidence,
            }
            for place, q in enumerate(one.question)
        ],
    }


def graded_document(question: Drilled, answer: str) -> dict[str, Any]:
    graded = grade_answer(answer, question.points)
    return {
        "share": graded.share,
        "right": graded.right,
        "found": graded.found,
        "missing": graded.missing,
        "answer": asdict(question.answer),
        "follow": asdict(question.follow),
    }


def quiz_document(asked: Sequence[Typed]) -> list[dict[str, Any]]:
    """Questions without their answers."""
    topics = load().topics
    return [
        {
            "topic": one.topic,
            "title": {"en": topics[one.topic].en.title, "zh": topics[one.topic].zh.title},
            "number": one.number,
            "ask": asdict(one.ask),
            "graded": bool(one.points),
        }
        for one in asked
    ]


def quiz_answer(question: Typed, graded: Graded | None) -> dict[str, Any]:
    """The model answer; with a rubric also which points were there."""
    document: dict[str, Any] = {"answer": asdict(question.answer), "graded": graded is not None}
    if graded is not None:
        document |= {
            "share": graded.share,
            "right": graded.right,
            "found": graded.found,
            "missing": graded.missing,
        }
    return document


def code_document(written: str) -> dict[str, Any]:
    """A source file of this package and the line that is meant; ValueError where there is none."""
    place = find_place(written)
    file = (ROOT / place.path).resolve()
    if not file.is_relative_to((ROOT / "cairn").resolve()) or file.suffix not in SHOWN:
        raise ValueError(f"{written}: only source files of this package are shown")
    return {
        "path": place.path,
        "line": place.line,
        "name": place.name,
        "lines": file.read_text(encoding="utf-8").splitlines(),
    }
