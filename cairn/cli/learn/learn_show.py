"""Terminal output of the roadmap: map, topic, plan and question."""

import re
import shutil
import textwrap
import unicodedata
from collections.abc import Sequence

from cairn.labs.catalogue import all_labs
from cairn.labs.code_location import find_place
from cairn.labs.exercises.exercise import exercises_of
from cairn.labs.lab import Language
from cairn.labs.learner import Learner
from cairn.labs.lesson import Lesson, lesson_of, reading_of, snippet_of
from cairn.labs.progress import Standing
from cairn.labs.quiz import Asked
from cairn.labs.roadmap import Heading, Topic
from cairn.labs.rubric import Graded, worded
from cairn.labs.wording import RUN_SIGNS, STATE_SIGNS, WORDS

UNBROKEN = re.compile(r"[!-~]+|.")  # numbers and Latin words stay whole in a Chinese line


def whole_map(learner: Learner, language: Language, course: str | None = None) -> list[str]:
    done = f"{learner.done}/{len(learner.standings)} {_word('of', language)}"
    lines = [f"{done}    {_legend(language)}"]
    for one in learner.roadmap.map.course:
        if course is not None and one.id != course:
            continue
        lines += ["", _course_line(one, language)]
        for section in learner.roadmap.map.section:
            if section.course == one.id:
                lines += _section(learner, section, language)
    return [*lines, "", f"{_word('next', language)}: cairn learn next | TOPIC | quiz | week | year"]


def proposals(learner: Learner, standings: Sequence[Standing], language: Language) -> list[str]:
    lines = []
    for one in standings:
        topic = learner.roadmap.topics[one.topic]
        lines += [f"{STATE_SIGNS[one.state]} {topic.id}: {topic.text(language).title}"]
        lines += [f"    cairn lab run {name}" for name in one.labs_left]
        if not one.answered:
            lines += [f"    cairn learn quiz --topic {topic.id}"]
    return lines


def topic(learner: Learner, one: Topic, language: Language, answers: bool) -> list[str]:
    text, state = one.text(language), learner.standings[one.id].state
    labs = [_lab_line(learner, name, language) for name in one.labs]
    lines = [f"{text.title}  ({one.id}, {_word(state, language)})", *wrapped(text.what, "  ")]
    lines += _titled("problem", wrapped(text.problem, "  "), language)
    lesson = lesson_of(one.id)
    lines += [] if lesson is None else _lesson(lesson, language)
    lines += _titled("debug", wrapped(text.debug, "  "), language)
    lines += _titled("code", [f"  {find_place(written)}" for written in one.code], language)
    lines += _titled("labs", labs, language)
    written = [f"  cairn exercise start {name}" for name in exercises_of(one.id)]
    lines += _titled("exercises", written, language)
    lines += _titled("commands", [f"  {command}" for command in one.commands], language)
    reading = [line for title in reading_of(one.reading, lesson) for line in wrapped(title, "  ")]
    lines += _titled("reading", reading, language)
    if one.requires:
        lines += ["", f"{_word('requires', language)}: {', '.join(one.requires)}"]
    lines += _titled("ask", wrapped(text.ask, "  "), language)
    hidden = [f"  ({_word('hidden', language)})"]
    lines += wrapped(text.answer, "  > ") if answers else hidden
    return lines if lesson is None else [*lines, *_interview(lesson, language, answers)]


def _lesson(lesson: Lesson, language: Language) -> list[str]:
    """Picture, worked number, the real code, and what goes wrong."""
    lines = _titled("picture", [f"  {line}" for line in lesson.picture.splitlines()], language)
    paragraphs = lesson.worked.of(language).strip().split("\n")
    worked = [line for paragraph in paragraphs for line in wrapped(paragraph, "  ")]
    lines += _titled("worked", worked, language)
    shown = snippet_of(lesson)
    lines += _titled("snippet", [f"  {shown.place}", *(f"  | {x}" for x in shown.lines)], language)
    mistakes = [line for one in lesson.mistakes for line in _item(one.of(language))]
    return [*lines, *_titled("mistakes", mistakes, language)]


def _interview(lesson: Lesson, language: Language, answers: bool) -> list[str]:
    lines = []
    for asked in lesson.interview:
        lines += wrapped(f"? {asked.ask.of(language)}", "  ")
        lines += wrapped(asked.answer.of(language), "  > ") if answers else []
    return _titled("asked", lines, language)


def plan(learner: Learner, which: str, language: Language) -> list[str]:
    stages = learner.roadmap.map.week if which == "week" else learner.roadmap.map.year
    lines = []
    for stage in stages:
        when, said = (stage.when_zh, stage.zh) if language == "zh" else (stage.when_en, stage.en)
        lines += [when, *wrapped(said, "  ")]
        for section in learner.roadmap.map.section:
            if section.id in stage.sections:
                lines += [f"    {_section_line(learner, section, language)}"]
        lines += [f"    {_signed(learner, name, language)}" for name in stage.topics]
    return lines


def question(asked: Asked, number: int, total: int, language: Language) -> list[str]:
    where = asked.topic if asked.lab is None else f"{asked.topic}, lab {asked.lab}"
    head = f"\n{_word('question', language)} {number}/{total}  ({where})"
    return [head, *wrapped(asked.ask.of(language), "  ")]


def answer(asked: Asked, language: Language, graded: Graded | None = None) -> list[str]:
    lines = grades(graded, language) if graded is not None else []
    lines += [_word("answer", language), *wrapped(asked.answer.of(language), "  ")]
    if asked.evidence:
        lines += [_word("evidence", language)]
        lines += [f"  {line.of(language)}" for line in asked.evidence]
    return lines


def grades(graded: Graded, language: Language) -> list[str]:
    """Points of the rubric that an answer contains and lacks."""
    found, missing = (
        "; ".join(worded(point, language) for point in points) or "–"
        for points in (graded.found, graded.missing)
    )
    return [f"  {graded.share:.0%}  ✓ {found}", f"       ✗ {missing}"]


def _course_line(course: Heading, language: Language) -> str:
    months = ""
    if course.months:
        months = f"  ({_word('months', language).format(*course.months)})"
    needs = f"  <- {', '.join(course.requires)}" if course.requires else ""
    return f"{course.id}  {course.title(language)}{months}{needs}"


def _section(learner: Learner, section: Heading, language: Language) -> list[str]:
    topics = learner.roadmap.of_section(section.id)
    signed = "  ".join(f"{_sign(learner, topic.id)} {topic.id}" for topic in topics)
    line = f"  {_section_line(learner, section, language)}"
    return [line, *wrapped(signed, "    ", whole="  ")]


def _section_line(learner: Learner, section: Heading, language: Language) -> str:
    topics = learner.roadmap.of_section(section.id)
    done = sum(learner.standings[topic.id].state == "done" for topic in topics)
    return f"{section.title(language)}  {done}/{len(topics)}"


def _signed(learner: Learner, name: str, language: Language) -> str:
    one = learner.roadmap.topics[name]
    return f"{_sign(learner, name)} {name}: {one.text(language).title}"


def _lab_line(learner: Learner, name: str, language: Language) -> str:
    title, run = all_labs()[name].title.of(language), learner.runs.get(name)
    if run is None:
        return f"  {STATE_SIGNS['ready']} {name}: {title}; cairn lab run {name}"
    return f"  {RUN_SIGNS[run.status]} {name}: {title}; {run.verdict.of(language)}"


def _legend(language: Language) -> str:
    return "  ".join(f"{sign} {_word(state, language)}" for state, sign in STATE_SIGNS.items())


def _titled(name: str, lines: list[str], language: Language) -> list[str]:
    """A part with its heading; nothing where it has nothing to say."""
    return ["", _word(name, language), *lines] if lines else []


def _sign(learner: Learner, topic: str) -> str:
    return STATE_SIGNS[learner.standings[topic].state]


def _word(name: str, language: Language) -> str:
    return WORDS[name].of(language)


def _item(text: str) -> list[str]:
    """A line with a dash, and under it what does not fit."""
    first, *more = wrapped(text, "    ")
    return [f"  - {first.lstrip()}", *more]


def wrapped(text: str, before: str, whole: str | None = None) -> list[str]:
    """Lines of the terminal's width. `whole`: break at this text only."""
    width = min(shutil.get_terminal_size().columns, 110) - len(before)
    if whole is not None:
        return [before + line for line in _filled(text.split(whole), whole, width)]
    if any(unicodedata.east_asian_width(letter) == "W" for letter in text):
        return [before + line for line in _filled(UNBROKEN.findall(text), "", width)]
    return [before + line for line in textwrap.wrap(text, width) or [""]]


def _filled(parts: list[str], between: str, width: int) -> list[str]:
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}{between}{part}" if lines[-1] else part
        if lines[-1] and _cells(longer) > width and part not in "，。；：、）” ":
            lines.append(part)
        else:
            lines[-1] = longer
    return [line.rstrip() for line in lines]


def _cells(text: str) -> int:
    """Columns of a terminal: Chinese letters take two."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
