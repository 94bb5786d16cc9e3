"""What all_reduce_perf of nccl-tests printed: sizes and times, from its table or its JSON.

    #       size         count      type   redop    root     time   algbw   busbw #wrong ...
         1048576        262144     float     sum      -1    45.98   22.81   39.91      0 ...

The out-of-place time is taken, in microseconds. A file without a single row is refused.
"""

import math
from pathlib import Path
from typing import NamedTuple

import msgspec

from cairn.core.errors import DataError

TEST = "all_reduce_perf"
FIELDS_BEFORE_TIME = 5  # size, count, type, redop, root


class Point(NamedTuple):
    bytes: int
    us: float


def read_sweep(path: Path) -> list[Point]:
    """Every size with its time, smallest first."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read {path}: {error}", hint="give the output of nccl-tests"
        ) from None
    _refuse_other_tests(path, text)
    points = _from_json(text) if text.lstrip().startswith("{") else _from_table(text)
    if not points:
        raise DataError(
            f"{path} has no row of nccl-tests",
            hint="give what all_reduce_perf printed, or its JSON",
        )
    return sorted(points)


def _refuse_other_tests(path: Path, text: str) -> None:
    """A sweep of another collective would calibrate the wrong thing."""
    _, found, rest = text.partition("Collective test concluded:")
    test = rest.split()[0] if found and rest.split() else TEST
    if test != TEST:
        raise DataError(f"{path} is a sweep of {test}", hint=f"give what {TEST} printed")


def _from_table(text: str) -> list[Point]:
    points = []
    for line in text.splitlines():
        words = line.split()
        if len(words) <= FIELDS_BEFORE_TIME or not words[0].isdigit():
            continue
        try:
            time = float(words[FIELDS_BEFORE_TIME])
        except ValueError:
            continue
        if 0 < time < math.inf and int(words[0]) > 0:
            points.append(Point(int(words[0]), time))
    return points


def _from_json(text: str) -> list[Point]:
    try:
        document = msgspec.json.decode(text)
        rows = [(row["size"], row["out_of_place"]["time"]) for row in document["results"]]
        return [Point(int(size), float(time)) for size, time in rows if size and time]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"this is not the JSON of nccl-tests: {error!r}") from None
