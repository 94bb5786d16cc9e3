"""Reader for the output of nccl-tests: sizes and times from its table or JSON, for one or several backends.

    #       size         count      type   redop    root     time   algbw   busbw #wrong ...
         1048576        262144     float     sum      -1    45.98   22.81   39.91      0 ...

A sweep is one test, one backend, one type and one reduction: `cairn comm bench` writes several into one file. The
out-of-place time is taken, in microseconds, the best one where a size was measured again. A file without a single row
is refused.
"""

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cairn.core.errors import DataError

TEST = "all_reduce_perf"
FIELDS_BEFORE_TIME = 5  # size, count, type, redop, root
WRONG = 8  # the column after time, algbw, busbw
PER_ITERATION = 4  # columns more on either side with -I
CONCLUDED = "Collective test concluded:"
BACKEND = "# backend:"


class SweepPoint(NamedTuple):
    bytes: int
    us: float


class MeasuredSweep(NamedTuple):
    test: str  # "" where the file does not say
    label: str  # what tells it from the others of the file; "" when it is the only one
    points: list[SweepPoint]  # smallest first
    least: list[SweepPoint]  # the same with the least of all that was measured, of either form
    wrong: list[str]  # sizes with wrong values, in words


class _Row(NamedTuple):
    kind: tuple[str, str, str, str]  # test, backend, type, reduction
    bytes: int
    us: float
    least: float
    wrong: int


def read_sweep(path: Path) -> list[SweepPoint]:
    """The all-reduce of a file, to calibrate by; one backend, one type."""
    sweeps = read_sweeps(path)
    others = [sweep.test for sweep in sweeps if sweep.test not in ("", TEST)]
    if others:  # it would calibrate the wrong thing
        raise DataError(f"{path} is a sweep of {others[0]}", hint=f"give what {TEST} printed")
    if len(sweeps) > 1:
        names = ", ".join(sweep.label for sweep in sweeps[:4])
        raise DataError(f"{path} has several sweeps: {names}", hint="give a file with one of them")
    return sweeps[0].points


def read_sweeps(path: Path) -> list[MeasuredSweep]:
    """Every sweep of a file, in its order."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read {path}: {error}", hint="give the output of nccl-tests"
        ) from None
    rows = _from_json(path, text) if text.lstrip().startswith("{") else _from_table(text)
    if not rows:
        raise DataError(
            f"{path} has no row of nccl-tests",
            hint="give what all_reduce_perf printed, or its JSON",
        )
    kinds = list(dict.fromkeys(row.kind for row in rows))
    differing = [place for place in range(4) if len({kind[place] for kind in kinds}) > 1]
    return [_sweep(kind, [row for row in rows if row.kind == kind], differing) for kind in kinds]


def _sweep(kind: tuple[str, ...], rows: list[_Row], differing: list[int]) -> MeasuredSweep:
    best: dict[int, float] = {}
    least: dict[int, float] = {}
    for row in rows:
        best[row.bytes] = min(best.get(row.bytes, math.inf), row.us)
        least[row.bytes] = min(least.get(row.bytes, math.inf), row.least)
    return MeasuredSweep(
        test=kind[0],
        label=" ".join(kind[place] for place in differing),
        points=[SweepPoint(size, us) for size, us in sorted(best.items())],
        least=[SweepPoint(size, us) for size, us in sorted(least.items())],
        wrong=[f"{row.bytes} bytes: {row.wrong} wrong values" for row in rows if row.wrong],
    )


def _from_table(text: str) -> list[_Row]:
    _, concluded, rest = text.partition(CONCLUDED)
    test = rest.split()[0] if concluded and rest.split() else ""
    rows, backend = [], ""
    for line in text.splitlines():
        words = line.split()
        if line.startswith(BACKEND):
            backend = line.removeprefix(BACKEND).strip()
        if len(words) <= FIELDS_BEFORE_TIME or not words[0].isdigit():
            continue
        try:
            time = float(words[FIELDS_BEFORE_TIME])
        except ValueError:
            continue
        if 0 < time < math.inf and int(words[0]) > 0:
            kind = (test, backend, words[2], words[3])
            rows.append(_Row(kind, int(words[0]), time, _least(words), _wrong_of(words)))
    return rows


def _more(words: list[str]) -> int:
    return PER_ITERATION if len(words) >= WRONG + 1 + 2 * PER_ITERATION + 4 else 0


def _wrong_of(words: list[str]) -> int:
    """Wrong values, in place and out of place; `N/A` counts as none because nothing was checked."""
    places = (WRONG, WRONG + 4 + _more(words))
    cells = [words[place] for place in places if place < len(words)]
    return sum(int(cell) for cell in cells if cell.isdigit())


def _least(words: list[str]) -> float:
    """The smallest time, in place and out of place, and of the iterations if -I printed them (i_min follows #wrong)."""
    more = _more(words)
    second = FIELDS_BEFORE_TIME + 4 + more
    places = [FIELDS_BEFORE_TIME, second, *([WRONG + 1, second + 4] if more else [])]
    return _smallest(words[place] for place in places if place < len(words))


def _smallest(cells: Iterable[object]) -> float:
    values = []
    for cell in cells:
        with contextlib.suppress(ValueError, TypeError):
            values.append(float(cell))  # pyrefly: ignore
    return min((value for value in values if 0 < value < math.inf), default=math.inf)


def _from_json(path: Path, text: str) -> list[_Row]:
    try:
        document = msgspec.json.decode(text)
        return [_row(row, document) for row in document["results"] if row["size"]]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path} is not the JSON of nccl-tests: {error!r}", hint="give the whole file"
        ) from None


def _row(row: dict[str, Any], document: dict[str, Any]) -> _Row:
    args = document.get("args") or [""]
    program = Path(str(args[0])).name
    test = row.get("experiment_name") or (program if program.endswith("_perf") else "")
    forms = [form for form in (row["out_of_place"], row.get("in_place")) if form]
    time = float(row["out_of_place"]["time"])
    if not 0 < time < math.inf:
        raise ValueError(f"a time of {time}")
    wrong = sum(int(form.get("nwrong") or 0) for form in forms)
    kind = (test, str(row.get("backend", "")), str(row.get("type", "")), str(row.get("redop", "")))
    spreads = [row.get(f"{form}_per_iter") or {} for form in ("out_of_place", "in_place")]
    least = _smallest([*(form["time"] for form in forms), *(one.get("min_us") for one in spreads)])
    return _Row(kind, int(row["size"]), time, least, wrong)
