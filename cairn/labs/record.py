"""The person's lab record: one line for each run, added at the end and never changed.

    $CAIRN_DATA/labs.jsonl, else $XDG_DATA_HOME/cairn, else ~/.local/share/cairn

It is no cache: what was learned and measured is kept. Several runs may write at once: a line goes out whole under a
lock. A last line that a crash or a full disk cut short is left out when reading, and said; the next run goes on behind
it. Does not know what a lab is.
"""

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from cairn.core.errors import DataError
from cairn.labs.entry import SCHEMA, Entry

FILE = "labs.jsonl"


class Record(NamedTuple):
    entries: list[Entry]  # oldest first
    trouble: list[str]  # lines that could not be read, and why


class _Version(msgspec.Struct):
    schema: int = 0


def data_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where Cairn keeps what must last."""
    environment = os.environ if environment is None else environment
    if own := environment.get("CAIRN_DATA"):
        return Path(own).expanduser()
    if shared := environment.get("XDG_DATA_HOME"):
        return Path(shared).expanduser() / "cairn"
    try:
        return Path.home() / ".local" / "share" / "cairn"
    except RuntimeError as error:  # a container may run under a user that has no home
        raise DataError(
            "there is no home folder to keep the lab record in", hint="set CAIRN_DATA to a folder"
        ) from error


def record_file() -> Path:
    return data_folder() / FILE


def append(entry: Entry, path: Path | None = None) -> None:
    """Adds one line; after a line that was cut short it begins a new one."""
    path = record_file() if path is None else path
    line = msgspec.json.encode(entry) + b"\n"
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
            f"cannot write the lab record {path}: {error}",
            hint="set CAIRN_DATA to a folder that you own and that has room",
        ) from error


def read(path: Path | None = None) -> Record:
    """Everything that can be read; a missing file is an empty record."""
    path = record_file() if path is None else path
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return Record([], [])
    except OSError as error:
        raise DataError(f"cannot read the lab record {path}: {error}") from error
    entries, trouble = [], []
    for number, line in enumerate(text.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            entries.append(_entry(line))
        except (msgspec.DecodeError, ValueError) as error:
            trouble.append(f"{path} line {number} is left out: {error}")
    return Record(entries, trouble)


def latest(entries: list[Entry]) -> dict[str, Entry]:
    """The newest run of each lab that came to a verdict; a failed one only where there is no other."""
    found: dict[str, Entry] = {}
    for entry in entries:
        before = found.get(entry.lab)
        if entry.status == "failed" and before is not None and before.status != "failed":
            continue
        found[entry.lab] = entry
    return found


def _entry(line: bytes) -> Entry:
    schema = msgspec.json.decode(line, type=_Version).schema
    if schema != SCHEMA:
        raise ValueError(f"it has schema {schema}, not {SCHEMA}")
    return msgspec.json.decode(line, type=Entry)


def _write_whole(descriptor: int, line: bytes, end: int) -> None:
    """All of it or nothing: what a full disk cut short is taken back."""
    left = line
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, end)
        raise
