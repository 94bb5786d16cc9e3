"""What an exercise is, where it stands, and how its skeleton comes out of its reference.

    set/NAME/about.toml     title, what is wanted, hints, planted mistakes: all texts in two languages
    set/NAME/reference.py   a whole answer (.c, .cpp, .cu or .go where it is in that language)
    set/NAME/grade.py       the cases that an answer must pass

    reference ──without what stands between `begin answer` and `end answer`──> skeleton
    reference ──one planted mistake, a replaced text──────────────────────────> must fail

The reference is small and stands alone; `solution` names the files of this project that do the same for real. Reads
files; runs nothing.
"""

import re
from functools import cache
from pathlib import Path

import msgspec

from cairn.core.errors import UsageError, did_you_mean
from cairn.labs.lab import Need, Words

SET = Path(__file__).parent / "set"
SUFFIXES = (".py", ".c", ".cpp", ".cu", ".go")
MARK = re.compile(r"^(?P<indent>\s*)(?:#|//) (?P<which>begin|end) answer(?:: (?P<instead>.*))?$")
UNWRITTEN = 'raise NotImplementedError("your code here")'


class Mistake(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault that learners make: a text of the reference and what stands there instead."""

    old: str
    new: str
    why: Words  # what it breaks


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What about.toml says."""

    course: str
    topics: list[str]
    minutes: int
    title: Words
    wanted: Words
    hints: list[Words]
    mistakes: list[Mistake]
    solution: list[str]  # "cairn/kernels/attention/merge_state.py:merge"
    needs: list[Need] = []
    # A Triton kernel, which runs in the interpreter where there is no GPU.
    interpreted: bool = False


class Exercise(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    about: About
    reference: Path
    grade: Path

    @property
    def file_name(self) -> str:
        return f"{self.name.replace('-', '_')}{self.reference.suffix}"

    @property
    def answer(self) -> str:
        """The reference as a learner would write it, without the marks."""
        lines = self.reference.read_text(encoding="utf-8").splitlines()
        return "\n".join(line for line in lines if MARK.match(line) is None) + "\n"

    @property
    def skeleton(self) -> str:
        return cut_answers(self.reference.read_text(encoding="utf-8"))

    def with_mistake(self, mistake: Mistake) -> str:
        """The reference with one planted fault; its text must stand in it exactly once."""
        text = self.answer
        if text.count(mistake.old) != 1:
            found = text.count(mistake.old)
            raise ValueError(f"{self.name}: {mistake.old!r} stands {found} times in the reference")
        return text.replace(mistake.old, mistake.new)


def cut_answers(text: str) -> str:
    """The text with every answer replaced by what its mark says, or by a NotImplementedError."""
    visible, inside = [], False
    for line in text.splitlines():
        mark = MARK.match(line)
        if mark is None:
            visible += [] if inside else [line]
            continue
        if (mark["which"] == "begin") == inside:
            raise ValueError(f"marks of an answer do not pair: {line!r}")
        inside = not inside
        if inside:
            visible.append(f"{mark['indent']}{mark['instead'] or UNWRITTEN}")
    if inside:
        raise ValueError("the last answer has no end")
    return "\n".join(visible) + "\n"


@cache
def all_exercises() -> dict[str, Exercise]:
    """Every exercise by name, course after course, the short ones first."""
    exercises = [
        _load(folder) for folder in sorted(SET.iterdir()) if (folder / "about.toml").exists()
    ]
    exercises.sort(key=lambda one: (one.about.course, one.about.minutes, one.name))
    return {one.name: one for one in exercises}


def exercises_of(topic: str) -> list[str]:
    """Names of the exercises that practise a topic."""
    return [name for name, one in all_exercises().items() if topic in one.about.topics]


def find_exercise(name: str) -> Exercise:
    exercises = all_exercises()
    if name not in exercises:
        otherwise = "`cairn exercise list` shows all of them"
        hint = did_you_mean(name, exercises, otherwise=otherwise)
        raise UsageError(f"there is no exercise '{name}'", hint=hint)
    return exercises[name]


def _load(folder: Path) -> Exercise:
    try:
        about = msgspec.toml.decode((folder / "about.toml").read_bytes(), type=About)
    except msgspec.DecodeError as error:
        raise ValueError(f"exercise {folder.name}: {error}") from error
    reference = next(
        folder / f"reference{end}" for end in SUFFIXES if (folder / f"reference{end}").exists()
    )
    return Exercise(
        name=folder.name.replace("_", "-"),
        about=about,
        reference=reference,
        grade=folder / "grade.py",
    )
