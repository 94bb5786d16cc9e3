"""The mock interview: rounds, questions with rubrics, follow-ups, and when a topic should be asked again.

    interview.toml   seven rounds; questions of each with the facts that a good answer has, and a follow-up
    drills.toml      the round `diagnose`: evidence to read, graded by the cause that was found
    evidence/*.txt   what real runs left: profiles and the errors of ranks
    lessons/*.toml   the round `topics`: two questions of each lesson
    due(answers)     topics whose last right answer is older than their interval: 1, 3, 7, 16, 35 days ...

Pure: reads no answers and writes nothing.
"""

import random
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

import msgspec

from cairn.core.errors import UsageError, did_you_mean
from cairn.labs.lab import Words
from cairn.labs.lesson import lessons
from cairn.labs.progress import Answer
from cairn.labs.rubric import Point

FILE = Path(__file__).with_name("interview.toml")
DRILLS = Path(__file__).with_name("drills.toml")
RECORDS = Path(__file__).with_name("evidence")
LESSONS = "topics"
INTERVALS_DAYS = (1, 3, 7, 16, 35, 90)  # after the first right answer in a row, the second, ...


class Drilled(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A question of a round."""

    topic: str
    ask: Words
    points: list[Point]
    answer: Words
    follow: Words  # what an interviewer asks next
    evidence: str = ""  # a log, a table or a trace to read first
    records: list[str] = []  # files of `evidence/` that belong to it: what a real run left


class Round(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: str
    title: Words
    minutes: int
    wants: Words  # what the interviewer looks for
    question: list[Drilled] = []


class Interview(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    round: list[Round]


@cache
def rounds() -> dict[str, Round]:
    by_id: dict[str, Round] = {}
    for file in (FILE, DRILLS):
        try:
            read = msgspec.toml.decode(file.read_bytes(), type=Interview)
        except msgspec.DecodeError as error:
            raise ValueError(f"{file.name}: {error}") from error
        by_id |= {one.id: _with_records(one) for one in read.round}
    by_id[LESSONS] = _lesson_round()
    return by_id


def _with_records(one: Round) -> Round:
    """Questions whose evidence is in files have it as text."""
    questions = [
        msgspec.structs.replace(question, evidence=_evidence(question)) for question in one.question
    ]
    return msgspec.structs.replace(one, question=questions)


def _evidence(question: Drilled) -> str:
    """Each record under its name."""
    texts = [
        f"--- {name}\n{(RECORDS / name).with_suffix('.txt').read_text(encoding='utf-8')}"
        for name in question.records
    ]
    return "\n".join([question.evidence, *texts]) if texts else question.evidence


def _lesson_round() -> Round:
    """Two questions of each lesson; what follows one is the other."""
    asked = [
        Drilled(topic=topic, ask=one.ask, points=one.points, answer=one.answer, follow=other.ask)
        for topic, lesson in lessons().items()
        for one, other in (lesson.interview, lesson.interview[::-1])
    ]
    return Round(
        id=LESSONS,
        title=Words("Topic by topic", "逐个主题"),
        minutes=45,
        wants=Words(
            "The mechanism, one number, and when it does not hold.",
            "机制、一个数字，以及何时不成立。",
        ),
        question=asked,
    )


def find_round(name: str) -> Round:
    if name not in rounds():
        hint = did_you_mean(name, rounds(), otherwise=f"rounds are: {', '.join(rounds())}")
        raise UsageError(f"there is no round '{name}'", hint=hint)
    return rounds()[name]


def choose(
    wanted: Iterable[Round], count: int, seed: int, due_topics: Iterable[str] = ()
) -> list[tuple[Round, Drilled]]:
    """Questions of these rounds in a mixed order; topics that are due come first."""
    pairs = [(one, question) for one in wanted for question in one.question]
    random.Random(seed).shuffle(pairs)
    waiting = set(due_topics)
    pairs.sort(key=lambda pair: pair[1].topic not in waiting)  # stable: the mixed order stays
    return pairs[:count]


def due(answers: Iterable[Answer], now: datetime) -> list[str]:
    """Topics to ask again: the latest answer was wrong, or its interval has passed. Longest overdue first."""
    by_topic: dict[str, list[Answer]] = {}
    for answer in answers:
        by_topic.setdefault(answer.topic, []).append(answer)
    when = {topic: _next_time(given) for topic, given in by_topic.items()}
    return [topic for topic, at in _by_time(when) if at <= now]


def _next_time(answers: list[Answer]) -> datetime:
    streak = 0
    for answer in reversed(answers):
        if not answer.right:
            break
        streak += 1
    last = datetime.fromisoformat(answers[-1].at)
    if streak == 0:
        return last
    return last + timedelta(days=INTERVALS_DAYS[min(streak, len(INTERVALS_DAYS)) - 1])


def _by_time(when: Mapping[str, datetime]) -> list[tuple[str, datetime]]:
    return sorted(when.items(), key=lambda pair: pair[1])
