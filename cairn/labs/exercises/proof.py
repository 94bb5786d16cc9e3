"""Does an exercise grade rightly? The reference passes, the skeleton fails, and so does every planted mistake.

    python -m cairn.labs.exercises.proof [--apart] [NAME ...]     one line for each fault; status 1 where there is one

Runs in this process, so exercises in Triton need TRITON_INTERPRET=1 where there is no GPU. With --apart every text is
graded in a process of its own, as a learner's is: on a GPU a mistake that reads elsewhere ends the process's device.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cairn.labs.exercises.check import check
from cairn.labs.exercises.exercise import Exercise, all_exercises, find_exercise
from cairn.labs.exercises.grading import Grade, grade

Grader = Callable[[Exercise, Path], Grade]


def faults(exercise: Exercise, grader: Grader = grade) -> Iterator[str]:
    """What is wrong with the exercise, one sentence each."""
    whole = _grade_text(exercise, exercise.answer, grader)
    for result in whole.graded:
        if not result.passed:
            why = result.said.en if result.said else f"{result.figure}"
            yield f"{exercise.name}: the reference fails '{result.what.en}': {why}"
    if _grade_text(exercise, exercise.skeleton, grader).passed:
        yield f"{exercise.name}: the skeleton passes"
    for mistake in exercise.about.mistakes:
        if _grade_text(exercise, exercise.with_mistake(mistake), grader).passed:
            yield f"{exercise.name}: no case catches that {mistake.why.en}"


def _grade_text(exercise: Exercise, text: str, grader: Grader) -> Grade:
    with tempfile.TemporaryDirectory(prefix="cairn-exercise-") as folder:
        file = Path(folder) / exercise.file_name
        file.write_text(text, encoding="utf-8")
        return grader(exercise, file)


if __name__ == "__main__":
    apart, names = "--apart" in sys.argv, [name for name in sys.argv[1:] if name != "--apart"]
    chosen = [find_exercise(name) for name in names] or list(all_exercises().values())
    grader = check if apart else grade
    wrong = [fault for exercise in chosen for fault in faults(exercise, grader)]
    print("\n".join(wrong) or f"{len(chosen)} exercises grade rightly")
    sys.exit(1 if wrong else 0)
