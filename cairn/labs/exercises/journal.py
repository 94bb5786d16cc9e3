"""What a learner did with exercises: one line for each start, hint and check, added and never changed.

$CAIRN_DATA/exercises.jsonl, beside the lab record. How lines are kept is `append_only_file`.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from cairn.labs import append_only_file, record

FILE = "exercises.jsonl"
NAME = "the journal of exercises"

Did = Literal["start", "hint", "passed", "failed"]


class Line(msgspec.Struct, frozen=True):
    exercise: str
    at: str  # UTC, ISO 8601
    did: Did


def add(exercise: str, did: Did) -> None:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    append_only_file.append(record.data_folder() / FILE, Line(exercise, at, did), NAME)


def read() -> list[Line]:
    decode = msgspec.json.Decoder(Line).decode
    return append_only_file.read(record.data_folder() / FILE, decode, NAME).values


def passed(lines: Sequence[Line]) -> set[str]:
    return {line.exercise for line in lines if line.did == "passed"}


def hints_seen(lines: Sequence[Line], exercise: str) -> int:
    return sum(line.exercise == exercise and line.did == "hint" for line in lines)
