"""Exercises, the interview and a graded answer as JSON documents for the page. Both languages are in each."""

from typing import Any

from msgspec.structs import asdict

from cairn.labs.code_place import find_place
from cairn.labs.exercises import journal
from cairn.labs.exercises.exercise import Exercise, all_exercises
from cairn.labs.interview import Drilled, Round
from cairn.labs.rubric import grade_answer


def exercises_document() -> list[dict[str, Any]]:
    """All of them in order; `passed` is what the journal of this machine says."""
    passed = journal.passed(journal.read())
    return [
        {
            "name": one.name,
            "course": one.about.course,
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
