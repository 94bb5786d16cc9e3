"""One person on the roadmap: what has run and was answered here, and the map as a document with that in it.

    look()  ──>  Learner  ──map_document──>  `cairn learn --json`, the page's map
                          ──topic_document─>  `cairn learn TOPIC --json`, the page's topic
                          ──lab_document───>  the page's report of a lab

Reads the lab record, the answers and the machine; draws nothing. Both languages are in every document.
"""

from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict

from cairn.hw.probe import probe
from cairn.labs import record
from cairn.labs.catalogue import all_labs
from cairn.labs.code_location import find_place
from cairn.labs.entry import Entry, about
from cairn.labs.exercises.exercise import all_exercises, exercises_of
from cairn.labs.figures import kind_sign, shown_cell, shown_gap, with_unit
from cairn.labs.lesson import lesson_of, reading_of, snippet_of
from cairn.labs.needs import unmet
from cairn.labs.prediction_accuracy import said_guess
from cairn.labs.progress import (
    Answers,
    Standing,
    answered_right,
    next_topics,
    placed_topics,
    standing,
)
from cairn.labs.roadmap import Heading, Roadmap, Topic, load

ANSWERS = "answers.jsonl"
PROPOSALS = 5


class Learner(NamedTuple):
    roadmap: Roadmap
    standings: dict[str, Standing]
    runs: dict[str, Entry]  # the newest of each lab
    trouble: list[str]  # what of the record and of the answers could not be read

    @property
    def done(self) -> int:
        return sum(one.state == "done" for one in self.standings.values())


def answers() -> Answers:
    return Answers(record.data_folder() / ANSWERS)


def look() -> Learner:
    """Where the person at this machine stands."""
    roadmap, runs_read, answers_read = load(), record.read(), answers().read()
    runs = {
        name: entry
        for name, entry in record.latest(runs_read.entries).items()
        if entry.status != "failed"
    }
    right = answered_right(answers_read.values)
    standings = standing(
        roadmap,
        labs_run=runs,
        labs_impossible=_impossible(),
        answered=right,
        placed=placed_topics(answers_read.values),
    )
    return Learner(roadmap, standings, runs, [*runs_read.trouble, *answers_read.trouble])


@cache
def _impossible() -> dict[str, str]:
    """Labs that this machine cannot run, and why; asked once, since a page asks where the learner stands each time."""
    machine = probe()
    return {
        name: reasons[0].en
        for name, lab in all_labs().items()
        if (reasons := unmet(lab.needs, machine))
    }


def map_document(learner: Learner) -> dict[str, Any]:
    """The whole map: courses, sections, topics with their state, and what to do next."""
    the_map = learner.roadmap.map
    return {
        "topics": len(learner.standings),
        "done": learner.done,
        "courses": [
            {
                **_heading(course),
                "requires": course.requires,
                "months": course.months,
                "sections": [
                    _section(learner, section)
                    for section in the_map.section
                    if section.course == course.id
                ],
            }
            for course in the_map.course
        ],
        "next": [one.topic for one in next_topics(learner.standings, PROPOSALS)],
        "plans": {
            "week": [msgspec.to_builtins(stage) for stage in the_map.week],
            "year": [msgspec.to_builtins(stage) for stage in the_map.year],
        },
        "labs": {name: _run(entry) for name, entry in learner.runs.items()},
    }


def topic_document(learner: Learner, topic: Topic) -> dict[str, Any]:
    """Everything about one topic, and the newest run of each of its labs."""
    return {
        **msgspec.to_builtins(topic),
        "standing": msgspec.to_builtins(learner.standings[topic.id]),
        "places": [str(find_place(written)) for written in topic.code],
        "lab_titles": {name: asdict(all_labs()[name].title) for name in topic.labs},
        "exercises": [
            {"name": name, "title": asdict(all_exercises()[name].about.title)}
            for name in exercises_of(topic.id)
        ],
        "reading": reading_of(topic.reading, lesson_of(topic.id)),
        "lesson": lesson_document(topic.id),
        "runs": [
            msgspec.to_builtins(learner.runs[name]) for name in topic.labs if name in learner.runs
        ],
    }


def lesson_document(topic: str) -> dict[str, Any] | None:
    """The hour behind a topic, with the code as it is now; None where there is none."""
    lesson = lesson_of(topic)
    if lesson is None:
        return None
    asked = [{"ask": asdict(one.ask), "answer": asdict(one.answer)} for one in lesson.interview]
    return {
        "picture": lesson.picture,
        "worked": asdict(lesson.worked),
        "snippet": msgspec.to_builtins(snippet_of(lesson)),
        "mistakes": [asdict(one) for one in lesson.mistakes],
        "interview": asked,
    }


def lab_document(learner: Learner, name: str) -> dict[str, Any]:
    """A lab, its newest run, and the run's figures as a person reads them."""
    run = learner.runs.get(name)
    return {
        "about": about(all_labs()[name], quick=True),  # the form that the page runs
        "run": run,
        "shown": None if run is None else _shown(run),
    }


def _shown(run: Entry) -> dict[str, Any]:
    """With units, in both languages; the page only lays them out."""
    table = run.table.rows if run.table is not None else []
    return {
        "checks": [
            {
                "predicted": asdict(with_unit(check.predicted, check.unit)),
                "measured": asdict(with_unit(check.measured, check.unit)),
                "gap": shown_gap(check.gap),
                "allowed": kind_sign(check),
            }
            for check in run.checks
        ],
        "table": [[asdict(shown_cell(cell)) for cell in row] for row in table],
        "guess": None if run.guess is None else asdict(said_guess(run.guess)),
    }


def _section(learner: Learner, section: Heading) -> dict[str, Any]:
    topics = learner.roadmap.of_section(section.id)
    return {
        **_heading(section),
        "topics": [
            {
                "id": topic.id,
                "en": topic.en.title,
                "zh": topic.zh.title,
                "requires": topic.requires,
                "labs": topic.labs,
                "state": learner.standings[topic.id].state,
            }
            for topic in topics
        ],
    }


def _heading(heading: Heading) -> dict[str, Any]:
    return {"id": heading.id, "en": heading.en, "zh": heading.zh}


def _run(entry: Entry) -> dict[str, Any]:
    return {
        "at": entry.at,
        "status": entry.status,
        "verdict": {"en": entry.verdict.en, "zh": entry.verdict.zh},
    }
