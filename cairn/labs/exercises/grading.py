"""What a case of an exercise is made of, and how all cases of an answer are graded.

    @case("blocks of any length agree with torch", "任意分块长度都与 torch 一致")
    def blocks(attempt):
        close(attempt.online_softmax(x, 3), torch.softmax(x, -1))

    @case("bytes sent per rank", "每个 rank 发送的字节")
    def bytes_sent(attempt):
        return Figure(sent, limit=2 * (n - 1) / n * size, unit="bytes")     # how near to the limit

`attempt` is the learner's module, or the path of a file in another language. A case fails by raising; what it raised,
and the line of the learner's file, are the explanation. A case that needs what this machine lacks raises `NotHere`: the
grade says so and counts the others. Runs the learner's code in this process: `check` runs it in one
of its own, with a time limit.
"""

import importlib.util
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from cairn.labs.exercises.exercise import Exercise
from cairn.labs.lab import Words

Attempt = Any  # a module with the names that the exercise asks for, or a Path


class Wrong(AssertionError):
    """A case did not get what it asked for; said in both languages."""

    def __init__(self, words: Words) -> None:
        super().__init__(words.en)
        self.words = words


class NotHere(Exception):
    """A case needs something that this machine does not have; says what, and how to get it."""

    def __init__(self, en: str, zh: str) -> None:
        super().__init__(en)
        self.words = Words(en, zh)


class Figure(msgspec.Struct, frozen=True):
    """How near an answer comes to the limit; past `allowed` times the limit the case fails."""

    measured: float
    limit: float
    unit: str
    allowed: float = 1.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    what: Words
    passed: bool
    looked_at: bool = True  # or this machine lacks what the case needs
    said: Words | None = None  # why it failed, or what is lacking
    line: int | None = None  # of the learner's file
    figure: Figure | None = None


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    exercise: str
    results: list[Result]

    @property
    def passed(self) -> bool:
        return bool(self.graded) and all(result.passed for result in self.graded)

    @property
    def graded(self) -> list[Result]:
        return [result for result in self.results if result.looked_at]


def case(en: str, zh: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a function of grade.py as a case and says what it looks at."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.case = Words(en, zh)  # type: ignore[attr-defined]
        return function

    return mark


def require(condition: object, en: str, zh: str) -> None:
    if not condition:
        raise Wrong(Words(en, zh))


def equal(got: object, wanted: object) -> None:
    require(got == wanted, f"got {got!r}, wanted {wanted!r}", f"得到 {got!r}，应为 {wanted!r}")


def close(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Tensors, arrays or numbers that agree up to a share of the largest value."""
    require(got is not None, "it returned None", "返回了 None")
    if isinstance(got, (int, float)) and isinstance(wanted, (int, float)):
        require(math.isfinite(got), "a value is not finite", "有非有限值")
        _near(abs(got - wanted), tolerance * max(1.0, abs(wanted)))
        return
    import torch  # here: most answers are graded without it, and it takes seconds to import

    got_t, wanted_t = (torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in (got, wanted))
    shapes = f"shape {tuple(got_t.shape)}, wanted {tuple(wanted_t.shape)}"
    require(got_t.shape == wanted_t.shape, shapes, shapes.replace("wanted", "应为"))
    require(torch.isfinite(got_t).all(), "a value is not finite", "有非有限值")
    if got_t.numel():
        gap, largest = float((got_t - wanted_t).abs().max()), float(wanted_t.abs().max())
        _near(gap, tolerance * max(1.0, largest))


def _near(gap: float, allowed: float) -> None:
    require(
        gap <= allowed,
        f"off by {gap:.3g}, allowed {allowed:.3g}",
        f"误差 {gap:.3g}，允许 {allowed:.3g}",
    )


def grade(exercise: Exercise, file: Path) -> Grade:
    """Every case of the exercise on the answer in `file`."""
    if exercise.about.interpreted and os.environ.get("TRITON_INTERPRET") == "1":
        import cairn.kernels.interpret  # noqa: F401  mends Triton's interpreter
    try:
        attempt = _module("cairn_attempt", file) if file.suffix == ".py" else file
    except Exception as error:  # noqa: BLE001  the learner's file may do anything
        what = Words("the file can be loaded", "文件可以加载")
        return Grade(exercise=exercise.name, results=[_failed(what, error, file)])
    cases = _cases(_module("cairn_grade", exercise.grade))
    return Grade(exercise=exercise.name, results=[_result(one, attempt, file) for one in cases])


def _result(one: Callable[..., Any], attempt: Attempt, file: Path) -> Result:
    what: Words = one.case  # type: ignore[attr-defined]
    try:
        outcome = one(attempt)
    except NotHere as lacking:
        return Result(what=what, passed=False, looked_at=False, said=lacking.words)
    except Exception as error:  # noqa: BLE001  whatever the learner's code raises is the explanation
        return _failed(what, error, file)
    if not isinstance(outcome, Figure):
        return Result(what=what, passed=True)
    passed = outcome.measured <= outcome.allowed * outcome.limit * (1 + 1e-9)
    return Result(what=what, passed=passed, figure=outcome)


def _failed(what: Words, error: Exception, file: Path) -> Result:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == file]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines.append(error.lineno)
    message = f"{type(error).__name__}: {error}"
    words = error.words if isinstance(error, Wrong) else Words(message, message)
    if isinstance(error, NotImplementedError):
        words = Words("not written yet", "还没有写")
    return Result(what=what, passed=False, said=words, line=lines[-1] if lines else None)


def _cases(module: ModuleType) -> Iterable[Callable[..., Any]]:
    return [value for value in vars(module).values() if hasattr(value, "case")]


def _module(name: str, file: Path) -> ModuleType:
    """Fresh from its file each time, as one that was just edited; nothing is written beside it."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.modules[name] = module  # dataclasses and Triton look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module
