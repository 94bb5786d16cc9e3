"""Grades a learner's file in a process of its own, so that an endless loop or a crash ends no other process.

    check(exercise, file)  ──>  python -m cairn.labs.exercises.check NAME FILE  ──JSON──>  Grade

A process that dies or takes too long is a failed case with that as its explanation.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from cairn.labs.exercises.exercise import Exercise, find_exercise
from cairn.labs.exercises.grading import Grade, Result, grade
from cairn.labs.lab import Words

LIMIT_S = 120.0
MARK = b"cairn-grade: "  # the learner's code may print, too


def check(exercise: Exercise, file: Path, limit_s: float = LIMIT_S) -> Grade:
    command = [sys.executable, "-m", "cairn.labs.exercises.check", exercise.name, str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if exercise.about.interpreted and not _has_gpu():
        environment["TRITON_INTERPRET"] = "1"
    try:
        process = subprocess.run(command, capture_output=True, timeout=limit_s, env=environment)
    except subprocess.TimeoutExpired:
        return _lost(
            exercise,
            Words(f"it did not end within {limit_s:g} s", f"{limit_s:g} 秒内没有结束"),
        )
    for line in reversed(process.stdout.splitlines()):
        if line.startswith(MARK):
            return msgspec.json.decode(line.removeprefix(MARK), type=Grade)
    last = process.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["?"]
    return _lost(
        exercise,
        Words(
            f"the process ended with status {process.returncode}: {last[0]}",
            f"进程以状态 {process.returncode} 退出：{last[0]}",
        ),
    )


def _lost(exercise: Exercise, why: Words) -> Grade:
    what = Words("the answer runs to its end", "答案可以运行完")
    return Grade(exercise=exercise.name, results=[Result(what=what, passed=False, said=why)])


def _has_gpu() -> bool:
    from cairn.hw.probe import probe

    return bool(probe().gpus)


if __name__ == "__main__":
    graded = grade(find_exercise(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.buffer.write(MARK + msgspec.json.encode(graded) + b"\n")
