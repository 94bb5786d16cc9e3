"""A file of JSON lines that is added to and never changed: nothing is lost, not by a crash, not by two writers.

    append(path, value)     one line, whole, under a lock; what a full disk cut short is taken back
    read(path, decode)      every line that can be read, and what is wrong with the others

A last line that a crash cut short is left out when reading, and said; the next one begins behind it. Does not know what
is in the lines.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from cairn.core.errors import DataError

Value = TypeVar("Value")


class Lines(NamedTuple, Generic[Value]):
    values: list[Value]  # oldest first
    trouble: list[str]  # lines that could not be read, and why


def append(path: Path, value: object, what: str) -> None:
    """Adds one line; after a line that was cut short it begins a new one. `what` names the file in an error."""
    line = msgspec.json.encode(value) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                line = b"\n" + line
            _write_whole(file.fileno(), line, end)
    except OSError as error:
        raise DataError(
            f"cannot write {what} {path}: {error}",
            hint="set CAIRN_DATA to a folder that you own and that has room",
        ) from error


def read(path: Path, decode: Callable[[bytes], Value], what: str) -> Lines[Value]:
    """Everything that can be read; a missing file has no lines."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return Lines([], [])
    except OSError as error:
        raise DataError(f"cannot read {what} {path}: {error}") from error
    values, trouble = [], []
    for number, line in enumerate(text.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            values.append(decode(line))
        except (msgspec.DecodeError, ValueError) as error:
            trouble.append(f"{path} line {number} is left out: {error}")
    return Lines(values, trouble)


def _write_whole(descriptor: int, line: bytes, end: int) -> None:
    """All of it or nothing: what a full disk cut short is taken back."""
    remaining = line
    try:
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
    except OSError:
        os.ftruncate(descriptor, end)
        raise
