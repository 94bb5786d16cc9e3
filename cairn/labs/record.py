"""The person's lab record: one line for each run, added at the end and never changed.

    $CAIRN_DATA/labs.jsonl, else $XDG_DATA_HOME/cairn, else ~/.local/share/cairn

It is no cache: what was learned and measured is kept. How lines are added and read is `append_only_file`. Does not
know what a lab is.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from cairn.core.errors import DataError
from cairn.labs import append_only_file
from cairn.labs.entry import SCHEMA, Entry

FILE = "labs.jsonl"
NAME = "the lab record"


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
    append_only_file.append(record_file() if path is None else path, entry, NAME)


def read(path: Path | None = None) -> Record:
    """Everything that can be read; a missing file is an empty record."""
    return Record(*append_only_file.read(record_file() if path is None else path, _entry, NAME))


def latest(entries: list[Entry]) -> dict[str, Entry]:
    """The newest run of each lab that came to a verdict; a failed one only where there is no other."""
    newest: dict[str, Entry] = {}
    for entry in entries:
        before = newest.get(entry.lab)
        if entry.status == "failed" and before is not None and before.status != "failed":
            continue
        newest[entry.lab] = entry
    return newest


def _entry(line: bytes) -> Entry:
    schema = msgspec.json.decode(line, type=_Version).schema
    if schema != SCHEMA:
        raise ValueError(f"it has schema {schema}, not {SCHEMA}")
    return msgspec.json.decode(line, type=Entry)
