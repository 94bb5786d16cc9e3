"""The mock interview: which questions, their model answers, and what this machine has measured about each.

    topics and labs ──pool──> Asked ──choose──> a few of them, those not yet answered first

    questions_of(topic) ──> Typed ──choose_typed──> what the page asks: typed, graded where there is a rubric

Evidence is the newest verdict of a lab on the person's own machine: an answer with a number from there is a good one.
Pure: reads no answers and writes nothing.
"""

import random
from collections.abc import Collection, Sequence

import msgspec

from cairn.labs.catalogue import all_labs
from cairn.labs.entry import Entry
from cairn.labs.figures import with_unit
from cairn.labs.lab import Words
from cairn.labs.learner import Learner
from cairn.labs.lesson import lesson_of
from cairn.labs.roadmap import Topic, load
from cairn.labs.rubric import Point


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    lab: str | None  # None: of the topic itself
    ask: Words
    answer: Words
    evidence: list[Words]  # measured on this machine
    points: list[Point] = []  # the rubric of a typed answer; none: the person judges


class Typed(msgspec.Struct, frozen=True, kw_only=True):
    """A question whose answer is typed: number 0 is the topic's own, which has no rubric; 1 and 2 are the lesson's."""

    topic: str
    number: int
    ask: Words
    answer: Words
    points: list[Point] = []


def pool(learner: Learner, topics: Sequence[Topic]) -> list[Asked]:
    """Every question of these topics: those with a rubric, then those of their labs; a lab's questions once."""
    questions, labs_seen = [], set()
    for topic in topics:
        runs = [learner.runs[name] for name in topic.labs if name in learner.runs]
        evidence = [line for run in runs for line in _evidence(run)]
        questions += [
            Asked(
                topic=topic.id,
                lab=None,
                ask=one.ask,
                answer=one.answer,
                evidence=evidence,
                points=one.points,
            )
            for one in questions_of(topic)[1:] or questions_of(topic)
        ]
        for name in topic.labs:
            if name not in labs_seen:
                labs_seen.add(name)
                questions += _of_lab(topic.id, name, learner)
    by_text = {one.ask.en: one for one in reversed(questions)}  # of equal ones the first stays
    return list(by_text.values())[::-1]


def choose(
    questions: Sequence[Asked], answered: Collection[str], count: int, seed: int
) -> list[Asked]:
    """A mixed handful; self-checks of topics that were not answered yet come before anything else."""
    dice = random.Random(seed)
    mixed = dice.sample(list(questions), len(questions))
    fresh = [one for one in mixed if one.lab is None and one.topic not in answered]
    rest = [one for one in mixed if one not in fresh]
    target = min(count, len(mixed))
    first = fresh[: max(target - target // 3, target - len(rest))]  # a third from the labs
    return [*first, *rest][:target]


def questions_of(topic: Topic) -> list[Typed]:
    """The topic's own self-check, and the two questions of its lesson."""
    own = Typed(
        topic=topic.id,
        number=0,
        ask=Words(topic.en.ask, topic.zh.ask),
        answer=Words(topic.en.answer, topic.zh.answer),
    )
    lesson = lesson_of(topic.id)
    asked = lesson.interview if lesson is not None else ()
    return [
        own,
        *(
            Typed(topic=topic.id, number=number, ask=one.ask, answer=one.answer, points=one.points)
            for number, one in enumerate(asked, start=1)
        ),
    ]


def find_question(topic: str, number: int) -> Typed | None:
    if topic not in load().topics:
        return None
    return next((one for one in questions_of(load().topics[topic]) if one.number == number), None)


def choose_typed(
    topics: Sequence[Topic], due: Sequence[str], answered: Collection[str], count: int, seed: int
) -> list[Typed]:
    """One question of each topic: first due, then never answered; with a rubric where there is one."""
    dice = random.Random(seed)
    mixed = dice.sample(list(topics), len(topics))
    mixed.sort(key=lambda topic: (topic.id not in due, topic.id in answered))  # stable
    return [dice.choice(questions_of(one)[1:] or questions_of(one)) for one in mixed[:count]]


def _of_lab(topic: str, name: str, learner: Learner) -> list[Asked]:
    evidence = _evidence(learner.runs[name]) if name in learner.runs else []
    return [
        Asked(topic=topic, lab=name, ask=one.ask, answer=one.answer, evidence=evidence)
        for one in all_labs()[name].questions
    ]


def _evidence(entry: Entry) -> list[Words]:
    """The verdict and its checks, one line each."""
    lines = [Words(f"{entry.lab}: {entry.verdict.en}", f"{entry.lab}：{entry.verdict.zh}")]
    for check in entry.checks:
        measured, predicted = (
            with_unit(value, check.unit) for value in (check.measured, check.predicted)
        )
        lines.append(
            Words(
                f"{check.what.en}: {measured.en} (predicted {predicted.en})",
                f"{check.what.zh}：{measured.zh}（预测 {predicted.zh}）",
            )
        )
    return lines
