"""`cairn exercise`: write the thing yourself and be graded.

    cairn exercise list                    all of them, by course
    cairn exercise start online-softmax    writes exercises/online_softmax.py with what is wanted
    cairn exercise check online-softmax    grades it: 0 passed, 1 not yet
    cairn exercise hint online-softmax     the next hint
    cairn exercise solution online-softmax the reference, and the file of this project that does it for real

Chooses and prints; `cairn.labs.exercises` grades.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn.cli.subverbs import Subverb, dispatch
from cairn.core.config import load
from cairn.core.errors import UsageError

if TYPE_CHECKING:
    from cairn.labs.exercises.exercise import Exercise
    from cairn.labs.exercises.grading import Grade

ABOUT = (
    "Exercises: a skeleton to fill in, tests that grade it, hints, and the project's own answer."
)

EXIT_NOT_PASSED = 1
FOLDER = Path("exercises")

Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
Language = Literal["en", "zh"]


class Listed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every exercise, with how long it takes and whether you have passed it."""

    course: str | None = None
    """of this course only: SYS-601 ... SYS-605"""
    lang: Language = "en"
    """language of the titles: en or zh"""
    json: bool = False
    """print one JSON document"""


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Write the skeleton of an exercise to a file."""

    name: Name
    """the exercise; `cairn exercise list` has them"""
    folder: Path = FOLDER
    """where the file goes"""
    again: bool = False
    """replace a file that is there already"""
    lang: Language = "en"
    """language of what is wanted: en or zh"""


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Grade an answer; status 0 when every case passes, 1 when one does not."""

    name: Name
    """the exercise"""
    folder: Path = FOLDER
    """where `start` wrote the file"""
    file: Path | None = None
    """grade this file instead"""
    reference: bool = False
    """grade the reference instead, to see that it can be done"""
    lang: Language = "en"
    """language of what is printed: en or zh"""
    json: bool = False
    """print one JSON document"""


class Hint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Show the next hint."""

    name: Name
    """the exercise"""
    step: int | None = None
    """this hint (from 1) instead of the next"""
    lang: Language = "en"
    """en or zh"""


class Solution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Show the reference, the mistakes that people make, and the project's own code."""

    name: Name
    """the exercise"""
    lang: Language = "en"
    """en or zh"""


def run(args: list[str]) -> int:
    return dispatch("exercise", ABOUT, SUBVERBS, args)


def run_list(args: list[str]) -> int:
    options = load(Listed, args=args, env_prefix="CAIRN_EXERCISE_LIST_").value
    from cairn.cli.learn import exercise_show
    from cairn.labs.exercises import journal
    from cairn.labs.exercises.exercise import all_exercises

    courses = sorted({one.about.course for one in all_exercises().values()})
    if options.course is not None and options.course not in courses:
        raise UsageError(
            f"there is no course '{options.course}'", hint=f"courses are: {', '.join(courses)}"
        )
    wanted = [options.course] if options.course is not None else courses
    chosen = [one for one in all_exercises().values() if one.about.course in wanted]
    passed = journal.passed(journal.read())
    if options.json:
        _print_json([exercise_show.document(one, one.name in passed) for one in chosen])
    else:
        print("\n".join(exercise_show.listing(chosen, passed, options.lang)))
    return 0


def run_start(args: list[str]) -> int:
    options = load(Start, args=args, env_prefix="CAIRN_EXERCISE_START_").value
    from cairn.cli.learn import exercise_show
    from cairn.labs.exercises import journal
    from cairn.labs.exercises.exercise import find_exercise

    exercise = find_exercise(options.name)
    file = options.folder / exercise.file_name
    if file.exists() and not options.again:
        raise UsageError(
            f"{file} is there already", hint="--again replaces it, --folder writes elsewhere"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(exercise_show.skeleton(exercise, options.lang), encoding="utf-8")
    journal.add(exercise.name, "start")
    print("\n".join(exercise_show.started(exercise, file, options.lang)))
    return 0


def run_check(args: list[str]) -> int:
    options = load(Check, args=args, env_prefix="CAIRN_EXERCISE_CHECK_").value
    from cairn.cli.learn import exercise_show
    from cairn.labs.exercises import journal
    from cairn.labs.exercises.check import check
    from cairn.labs.exercises.exercise import find_exercise

    exercise = find_exercise(options.name)
    _refuse_unmet(exercise, options.lang)
    file = exercise.reference if options.reference else _answer_file(exercise, options)
    if options.reference:
        graded = _graded_elsewhere(exercise)
    else:
        graded = check(exercise, file)
        journal.add(exercise.name, "passed" if graded.passed else "failed")
    if options.json:
        _print_json({**msgspec.to_builtins(graded), "file": str(file), "passed": graded.passed})
    else:
        print("\n".join(exercise_show.graded(exercise, graded, file, options.lang)))
    return 0 if graded.passed else EXIT_NOT_PASSED


def _graded_elsewhere(exercise: "Exercise") -> "Grade":
    """The reference in a folder that goes: what a grade compiles stands beside the answer, not in the package."""
    import shutil
    import tempfile

    from cairn.labs.exercises.check import check

    with tempfile.TemporaryDirectory(prefix="cairn-exercise-") as folder:
        return check(exercise, Path(shutil.copy(exercise.reference, folder)))


def run_hint(args: list[str]) -> int:
    options = load(Hint, args=args, env_prefix="CAIRN_EXERCISE_HINT_").value
    from cairn.cli.learn import exercise_show
    from cairn.labs.exercises import journal
    from cairn.labs.exercises.exercise import find_exercise

    exercise = find_exercise(options.name)
    hints = exercise.about.hints
    step = options.step
    if step is None:
        step = min(journal.hints_seen(journal.read(), exercise.name) + 1, len(hints))
        journal.add(exercise.name, "hint")
    if not 1 <= step <= len(hints):
        raise UsageError(f"{exercise.name} has hints 1 to {len(hints)}, not {step}")
    print("\n".join(exercise_show.hint(hints[step - 1], step, len(hints), options.lang)))
    return 0


def run_solution(args: list[str]) -> int:
    options = load(Solution, args=args, env_prefix="CAIRN_EXERCISE_SOLUTION_").value
    from cairn.cli.learn import exercise_show
    from cairn.labs.exercises.exercise import find_exercise

    print("\n".join(exercise_show.solution(find_exercise(options.name), options.lang)))
    return 0


def _answer_file(exercise: "Exercise", options: Check) -> Path:
    file = options.file or options.folder / exercise.file_name
    if not file.is_file():
        raise UsageError(f"there is no {file}", hint=f"cairn exercise start {exercise.name}")
    wanted = Path(exercise.file_name).suffix
    if file.suffix != wanted:
        raise UsageError(
            f"{file} has another ending than {wanted}, so it cannot be an answer to {exercise.name}",
            hint=f"`cairn exercise start {exercise.name}` writes {exercise.file_name}",
        )
    return file.resolve()


def _refuse_unmet(exercise: "Exercise", language: Language) -> None:
    from cairn.hw.probe import probe
    from cairn.labs.needs import unmet

    if reasons := unmet(exercise.about.needs, probe()):
        raise UsageError("; ".join(reason.of(language) for reason in reasons))


def _print_json(document: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(document)).decode())


SUBVERBS: dict[str, Subverb] = {
    "list": Subverb(run_list, "which exercises there are, and which you have passed"),
    "start": Subverb(run_start, "write the skeleton of one to a file"),
    "check": Subverb(run_check, "grade your answer, case by case"),
    "hint": Subverb(run_hint, "the next hint"),
    "solution": Subverb(run_solution, "the reference, common mistakes, the project's own code"),
}
