"""The roadmap as data: courses, their sections, and topics that need one another.

    roadmap.toml          courses SYS-601..605, sections, the plans for a week and for a year
    roadmap/SECTION.toml  the topics of a section: code here, labs, commands, reading, and the text in two languages

`load` reads and checks the form; `problems` also looks whether code, labs and prerequisites exist, which is what
`python -m cairn.labs.roadmap` prints and a test demands to be empty. Knows nothing about who has learnt what.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

from cairn.core.errors import UsageError, did_you_mean
from cairn.labs.catalogue import all_labs
from cairn.labs.code_location import find_place
from cairn.labs.lab import Language

HERE = Path(__file__).parent


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A topic in one language."""

    title: str
    what: str
    problem: str  # which one it solves
    debug: str  # how to see it and what to look for
    ask: str  # the self-check
    answer: str


class Topic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    names: list[str]  # how the roadmap calls it
    code: list[str]
    en: Text
    zh: Text
    requires: list[str] = []
    labs: list[str] = []
    commands: list[str] = []
    reading: list[str] = []
    id: str = ""
    section: str = ""

    def text(self, language: Language) -> Text:
        return self.zh if language == "zh" else self.en


class Heading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A course or a section: a title and how it hangs together with others."""

    id: str
    en: str
    zh: str
    course: str = ""  # of a section
    requires: list[str] = []  # courses that come before a course
    months: tuple[int, int] | None = None  # of a course, in the year's plan

    def title(self, language: Language) -> str:
        return self.zh if language == "zh" else self.en


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A day of the week's plan or a stretch of the year's."""

    when_en: str
    when_zh: str
    en: str
    zh: str
    topics: list[str] = []
    sections: list[str] = []


class Map(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    course: list[Heading]
    section: list[Heading]
    week: list[Stage]
    year: list[Stage]


class Roadmap(msgspec.Struct, frozen=True):
    map: Map
    topics: dict[str, Topic]  # in the order in which they are best learnt, section after section

    def topic(self, name: str) -> Topic:
        if name not in self.topics:
            hint = did_you_mean(name, self.topics, otherwise="`cairn learn` shows all topics")
            raise UsageError(f"there is no topic '{name}'", hint=hint)
        return self.topics[name]

    def of_section(self, section: str) -> list[Topic]:
        return [topic for topic in self.topics.values() if topic.section == section]


@cache
def load() -> Roadmap:
    """Every topic of every section; a file that is missing or misspelt is a bug and raises."""
    the_map = msgspec.toml.decode((HERE / "roadmap.toml").read_bytes(), type=Map)
    topics: dict[str, Topic] = {}
    for section in the_map.section:
        for name, topic in _read_section(section.id).items():
            if name in topics:
                raise ValueError(f"topic {name} is in {topics[name].section} and in {section.id}")
            topics[name] = msgspec.structs.replace(topic, id=name, section=section.id)
    return Roadmap(the_map, topics)


def _read_section(section: str) -> dict[str, Topic]:
    file = HERE / "roadmap" / f"{section}.toml"
    try:
        return msgspec.toml.decode(file.read_bytes(), type=dict[str, Topic])
    except msgspec.DecodeError as error:
        raise ValueError(f"{file.name}: {error}") from error


def problems(roadmap: Roadmap) -> list[str]:
    """Everything in it that points nowhere."""
    problems = list(_circles(roadmap.topics))
    for topic in roadmap.topics.values():
        problems += [f"{topic.id}: {what}" for what in _problems_of(topic, roadmap)]
    sections = {section.id for section in roadmap.map.section}
    for stage in (*roadmap.map.week, *roadmap.map.year):
        problems += [
            f"plan: no topic {name}" for name in stage.topics if name not in roadmap.topics
        ]
        problems += [f"plan: no section {name}" for name in stage.sections if name not in sections]
    return problems


def _problems_of(topic: Topic, roadmap: Roadmap) -> Iterator[str]:
    for name in topic.requires:
        if name not in roadmap.topics:
            yield f"requires {name}, which is no topic"
    for lab in topic.labs:
        if lab not in all_labs():
            yield f"names lab {lab}, which does not exist"
    if not topic.labs and not topic.commands:
        yield "has neither a lab nor a command"
    if not topic.code:
        yield "names no code"
    for written in topic.code:
        try:
            find_place(written)
        except ValueError as error:
            yield str(error)
    for command in topic.commands:
        if not command.startswith(("cairn ", "make ", "python -m cairn.")):
            yield f"command `{command}` is not ours"


def _circles(topics: Mapping[str, Topic]) -> Iterator[str]:
    """Topics that need themselves in the end."""
    settled: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Iterator[str]:
        if name in path:
            yield f"circle: {' -> '.join((*path[path.index(name) :], name))}"
        elif name not in settled and name in topics:
            for needed in topics[name].requires:
                yield from visit(needed, (*path, name))
            settled.add(name)

    for name in topics:
        yield from visit(name, ())


if __name__ == "__main__":
    whole = load()
    wrong = problems(whole)
    print("\n".join(wrong) or f"{len(whole.topics)} topics, nothing points nowhere")
    sys.exit(1 if wrong else 0)
