"""Runs a Python program that a model wrote, and says what it printed.

    run_python("print(6 * 7)")  ->  "42"

The program runs in a process of its own (`sandbox_child`) that can open no file and no socket and start no process,
with an empty environment, so much memory, so many seconds of the processor and on the clock, and so many characters
that it may print. Whatever it does, an answer comes in time. Linux only; elsewhere it is refused.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, NamedTuple, cast

from cairn.align.sandbox_child import UNSUPPORTED
from cairn.core.errors import HardwareError

CHILD = Path(__file__).with_name("sandbox_child.py")
KILLED = "TimeoutError: the program ran too long"
TOO_LONG = " ..."


class SandboxLimits(NamedTuple):
    seconds: int = 2  # of the processor
    wall_s: float = 5.0
    memory_bytes: int = 512 << 20
    characters: int = 1000  # printed


def run_python(source: str, limits: SandboxLimits = SandboxLimits()) -> str:  # noqa: B008 (immutable)
    """Run a program and return its output, or the last line of its traceback."""
    check_supported()
    text, code = _run(source, limits)
    if code in (-signal.SIGKILL, -signal.SIGXCPU) and not text:
        return KILLED
    return text if len(text) <= limits.characters else text[: limits.characters] + TOO_LONG


@functools.cache
def check_supported() -> None:
    """Check sandbox support before the first program, whose own exit status would be ambiguous."""
    if _run("", SandboxLimits())[1] == UNSUPPORTED:
        raise HardwareError(
            "Python programs of a model are run on Linux only, where system calls can be filtered",
            hint="use task.kind = calculator",
        )


def _run(source: str, limits: SandboxLimits) -> tuple[str, int]:
    command = [
        sys.executable,
        "-I",
        "-S",
        str(CHILD),
        str(limits.seconds),
        str(limits.memory_bytes),
    ]
    most = 4 * limits.characters
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={},
        cwd="/",
        start_new_session=True,
    )
    late = threading.Timer(limits.wall_s, _kill, [child])
    late.start()
    printed = b""
    try:
        with contextlib.suppress(BrokenPipeError):
            cast(IO[bytes], child.stdin).write(source.encode(errors="replace"))
            cast(IO[bytes], child.stdin).close()
        printed = cast(IO[bytes], child.stdout).read(most)
    finally:
        late.cancel()
        _finish(child, wait_s=1.0 if len(printed) < most else 0.0)
    return printed.decode(errors="replace").strip(), child.returncode


def _finish(child: "subprocess.Popen[bytes]", wait_s: float) -> None:
    """Ended by itself, or by us if it goes on printing."""
    try:
        child.wait(wait_s)
    except subprocess.TimeoutExpired:
        _kill(child)
        child.wait()
    cast(IO[bytes], child.stdout).close()


def _kill(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
