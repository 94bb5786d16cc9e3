"""Exercises as text for a terminal, in English or in Chinese. Prints nothing itself."""

from collections.abc import Collection, Sequence
from pathlib import Path

from cairn.cli.learn.learn_show import wrapped
from cairn.core.prose import in_terminal
from cairn.labs.code_location import find_place
from cairn.labs.exercises.exercise import Exercise
from cairn.labs.exercises.grading import Figure, Grade, Result
from cairn.labs.figures import figure
from cairn.labs.lab import Language, Words
from cairn.labs.roadmap import load
from cairn.labs.wording import WORDS


def document(exercise: Exercise, passed: bool) -> dict[str, object]:
    """JSON description of an exercise without its answer."""
    about = exercise.about
    return {
        "name": exercise.name,
        "course": about.course,
        "topics": about.topics,
        "minutes": about.minutes,
        "title": about.title,
        "wanted": about.wanted,
        "hints": len(about.hints),
        "passed": passed,
    }


def listing(
    exercises: Sequence[Exercise], passed: Collection[str], language: Language
) -> list[str]:
    lines: list[str] = []
    width = max((len(one.name) for one in exercises), default=0)
    titles = {course.id: Words(course.en, course.zh) for course in load().map.course}
    for course in dict.fromkeys(one.about.course for one in exercises):
        lines.append(f"{course}  {titles[course].of(language)}")
        for one in exercises:
            if one.about.course == course:
                sign = "✓" if one.name in passed else "○"
                title = one.about.title.of(language)
                row = f"{sign} {one.name:<{width}}  {one.about.minutes:>3} min  {title}"
                lines.append(in_terminal(row, " " * (width + 13)))
        lines.append("")
    hours = sum(one.about.minutes for one in exercises) / 60
    done = sum(one.name in passed for one in exercises)
    said = Words(
        f"{len(exercises)} exercises, about {hours:.0f} hours; {done} passed",
        f"共 {len(exercises)} 个练习，约 {hours:.0f} 小时；已通过 {done} 个",
    )
    return [*lines, said.of(language)]


def skeleton(exercise: Exercise, language: Language) -> str:
    """The file that a learner gets: what is wanted as a comment, then the code."""
    sign = "#" if exercise.reference.suffix == ".py" else "//"
    wanted = [f"{sign} {line}" for line in wrapped(exercise.about.wanted.of(language), "")]
    head = [f"{sign} {exercise.about.title.of(language)}", sign, *wanted, sign]
    head.append(f"{sign} {_command('check', exercise, language)}")
    return "\n".join(head) + "\n\n" + exercise.skeleton


def started(exercise: Exercise, file: Path, language: Language) -> list[str]:
    about = exercise.about
    return [
        f"{about.title.of(language)}  ({about.course}, {about.minutes} {_word('minutes', language)})",
        *wrapped(about.wanted.of(language), "  "),
        "",
        f"{_word('wrote', language)} {file}",
        f"{_word('then', language)}: {_command('check', exercise, language)}",
    ]


def graded(exercise: Exercise, grade: Grade, file: Path, language: Language) -> list[str]:
    lines = [f"{exercise.about.title.of(language)}  ({file})"]
    for result in grade.results:
        lines += _result(result, language)
    count = sum(result.passed for result in grade.graded)
    said = _word("passed" if grade.passed else "not yet", language)
    lines += ["", f"{said}: {count}/{len(grade.graded)}"]
    if not grade.passed:
        lines.append(_command("hint", exercise, language))
    return lines


def hint(text: Words, step: int, steps: int, language: Language) -> list[str]:
    return [f"{_word('hint', language)} {step}/{steps}", *wrapped(text.of(language), "  ")]


def solution(exercise: Exercise, language: Language) -> list[str]:
    about = exercise.about
    lines = [about.title.of(language), "", *exercise.answer.splitlines(), ""]
    lines.append(_word("mistakes", language))
    lines += [f"  - {mistake.why.of(language)}" for mistake in about.mistakes]
    lines += ["", _word("code", language)]
    return [*lines, *(f"  {find_place(written)}" for written in about.solution)]


def _result(result: Result, language: Language) -> list[str]:
    near = f"  {_near(result.figure, language)}" if result.figure else ""
    sign = ("✓" if result.passed else "✗") if result.looked_at else "–"
    lines = [f"{sign} {result.what.of(language)}{near}"]
    if result.said is not None:
        where = f"{_word('line', language).format(result.line)}: " if result.line else ""
        lines += wrapped(f"{where}{result.said.of(language)}", "    ")
    return lines


def _near(found: Figure, language: Language) -> str:
    share = found.measured / found.limit if found.limit else float("inf")
    said = Words(
        f"{figure(found.measured)} {found.unit}, {share:.2f}x the limit of {figure(found.limit)}",
        f"{figure(found.measured)} {found.unit}，为下限 {figure(found.limit)} 的 {share:.2f} 倍",
    )
    return said.of(language)


def _command(verb: str, exercise: Exercise, language: Language) -> str:
    flag = "" if language == "en" else f" --lang {language}"
    return f"cairn exercise {verb} {exercise.name}{flag}"


def _word(name: str, language: Language) -> str:
    return WORDS[name].of(language)
