"""Records of event files: their types, encoding and decoding.

    {"kind":"process","version":1,"name":"cairn generate","pid":42,...}     always the first line
    {"kind":"thread","thread":42,"name":"MainThread"}
    {"kind":"span","name":"prefill","start_ns":...,"duration_ns":...,"thread":42,"fields":{...}}

Times are nanoseconds of the monotonic clock of the process. Writing never fails, whatever a field
holds. Reading forgives exactly one thing, a last line that was cut off by the end of its process.
Knows neither when records are made (`events`) nor what they are good for (`trace`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cairn.core.errors import DataError

VERSION = 1


class Process(msgspec.Struct, frozen=True, tag_field="kind", tag="process"):
    """The writing process, and one instant on both clocks."""

    version: int
    name: str
    pid: int
    host: str
    boot: str  # processes with the same boot share one monotonic clock; empty when unknown
    rank: int | None
    wall_ns: int
    monotonic_ns: int


class Thread(msgspec.Struct, frozen=True, tag_field="kind", tag="thread"):
    """The name of a thread, before its first event and whenever it changes."""

    thread: int
    name: str


class Span(msgspec.Struct, frozen=True, tag_field="kind", tag="span"):
    """Something that took time."""

    name: str
    start_ns: int
    duration_ns: int
    thread: int
    fields: dict[str, Any] = {}
    error: str | None = None  # the exception that ended it


class Instant(msgspec.Struct, frozen=True, tag_field="kind", tag="instant"):
    """Something that happened."""

    name: str
    at_ns: int
    thread: int
    fields: dict[str, Any] = {}


class Scalar(msgspec.Struct, frozen=True, tag_field="kind", tag="scalar"):
    """A number at a moment."""

    name: str
    at_ns: int
    thread: int
    value: float | None  # None is a value that is not a finite number
    fields: dict[str, Any] = {}


class Dropped(msgspec.Struct, frozen=True, tag_field="kind", tag="dropped"):
    """So many records since the last such line found the queue full."""

    at_ns: int
    count: int


Record = Process | Thread | Span | Instant | Scalar | Dropped


def encode(record: Record) -> bytes:
    """The record as a line; what JSON cannot hold becomes its repr."""
    try:
        return _encoder.encode(record) + b"\n"
    except (TypeError, ValueError, OverflowError, RecursionError):
        # A key, a cycle or half a surrogate pair: the encoder's hook is not asked about these.
        clean: dict[str, Any] = {"name": _printable(getattr(record, "name", ""))}
        if fields := getattr(record, "fields", None):
            clean["fields"] = {_printable(key): _printable(fields[key]) for key in fields}
        return _encoder.encode(msgspec.structs.replace(record, **clean)) + b"\n"


def read(path: Path) -> Iterator[Record]:
    """The records of a file in the order of writing; none for a process that died before the first.

    A line that cannot be read is a DataError with its number, unless it is the last one and has no
    end: then the process was killed while it wrote.
    """
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                record = _decoder.decode(line)
            except msgspec.DecodeError as error:
                if not line.endswith(b"\n"):
                    return
                raise DataError(
                    f"{path} line {number} is not an event: {error}",
                    hint="the file is damaged, or something else wrote into it; leave it out",
                ) from None
            if (number == 1) != isinstance(record, Process):
                raise DataError(
                    f"{path} line {number} is a '{type(record).__struct_config__.tag}' record",
                    hint="the first line of an event file, and only that, says which process wrote",
                )
            yield record


def _open(path: Path):  # noqa: ANN202  typing's name for a binary file says less than open does
    try:
        return path.open("rb")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(f"cannot read {path}: {reason}", hint="check the path") from None


def _printable(value: object) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception as error:  # noqa: BLE001  the __repr__ of another library
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text.encode(errors="backslashreplace").decode()


_encoder = msgspec.json.Encoder(enc_hook=_printable)
_decoder = msgspec.json.Decoder(Record)
