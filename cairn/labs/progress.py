"""Who has learnt what: a topic is done when its labs have run and its question was answered.

    answers.jsonl   one line for each question that was answered: topic, when, whether the person had it right
    the lab record  which labs have run here

`standing` is pure; only `Answers` touches a file. A topic whose labs this machine cannot run (no GPU) is done by its
question alone, and says so: no learner should be stuck for want of hardware. A topic that was tested out of
(`cairn learn placement`) is done as well.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from cairn.labs import append_only_file
from cairn.labs.roadmap import Roadmap, Topic

State = Literal["done", "begun", "ready", "later"]

NAME = "the file of answers"


class Answer(msgspec.Struct, frozen=True):
    topic: str
    at: str  # UTC, ISO 8601
    right: bool  # by the rubric, or in the person's own judgement beside the model answer
    # Both questions of a placement test were right: its labs need not be run.
    placed: bool = False


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    state: State
    labs_left: list[str]
    labs_impossible: list[str]  # their needs are not met on this machine
    answered: bool
    missing: list[str]  # topics to learn first


class Answers:
    """The file of answers; how lines are added and read is `append_only_file`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, topic: str, right: bool, placed: bool = False) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        append_only_file.append(self.path, Answer(topic, at, right, placed), NAME)

    def read(self) -> append_only_file.Lines[Answer]:
        """All of them, oldest first, and what is wrong with lines that cannot be read."""
        decode = msgspec.json.Decoder(Answer).decode
        return append_only_file.read(self.path, decode, NAME)

    def right(self) -> set[str]:
        """Topics whose latest answer was right."""
        return answered_right(self.read().values)


def answered_right(answers: Iterable[Answer]) -> set[str]:
    """Topics whose latest answer was right."""
    latest = {answer.topic: answer.right for answer in answers}
    return {topic for topic, right in latest.items() if right}


def placed_topics(answers: Iterable[Answer]) -> set[str]:
    """Topics that a placement test has shown to be known; a later wrong answer does not take that back."""
    return {answer.topic for answer in answers if answer.placed}


def standing(
    roadmap: Roadmap,
    *,
    labs_run: Collection[str],
    labs_impossible: Mapping[str, str],
    answered: Collection[str],
    placed: Collection[str] = (),
) -> dict[str, Standing]:
    """Where a person stands with each topic, in the roadmap's order."""
    done_topics = {
        topic.id
        for topic in roadmap.topics.values()
        if topic.id in placed
        or (topic.id in answered and not _labs_left(topic, labs_run, labs_impossible))
    }
    standings = {}
    for topic in roadmap.topics.values():
        labs_left = _labs_left(topic, labs_run, labs_impossible)
        missing = [name for name in topic.requires if name not in done_topics]
        begun = topic.id in answered or any(lab in labs_run for lab in topic.labs)
        standings[topic.id] = Standing(
            topic=topic.id,
            state=_state(topic.id in done_topics, begun, bool(missing)),
            labs_left=labs_left,
            labs_impossible=[lab for lab in topic.labs if lab in labs_impossible],
            answered=topic.id in answered,
            missing=missing,
        )
    return standings


def next_topics(standings: Mapping[str, Standing], count: int) -> list[Standing]:
    """What to do now: what was begun first, then what is ready, in the roadmap's order."""
    begun = [one for one in standings.values() if one.state == "begun"]
    ready = [one for one in standings.values() if one.state == "ready"]
    return [*begun, *ready][:count]


def _labs_left(topic: Topic, labs_run: Collection[str], impossible: Mapping[str, str]) -> list[str]:
    return [lab for lab in topic.labs if lab not in labs_run and lab not in impossible]


def _state(done: bool, begun: bool, blocked: bool) -> State:
    if done:
        return "done"
    if begun:
        return "begun"
    return "later" if blocked else "ready"
