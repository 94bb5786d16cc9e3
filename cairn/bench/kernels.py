"""Every kernel on every shape: is it right, how fast is it, what is the ceiling, and who else does it?

    cases -> error against a reference -> time of ours and of each anchor -> Row -> kernels.json

The ceilings (copy bandwidth, matmul rates) are measured first, on the same device in the same process. A case that
fails becomes a row that says so, and the rest goes on. The file is written after every row, so that a run which is
stopped keeps what it has. Prints nothing.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cairn.bench import record
from cairn.bench.record import RecordOrigin, merged
from cairn.bench.record import write as write
from cairn.core.errors import HardwareError
from cairn.kernels.kernel import Case
from cairn.kernels.tooling import catalogue
from cairn.kernels.tooling.measure import Ceiling, Row, first_line, measure_case


class KernelReport(RecordOrigin, frozen=True, kw_only=True):
    """benchmarks/h200/kernels.json."""

    ceiling: Ceiling
    rows: list[Row]


def find_cases(only: Sequence[str], matching: str = "") -> list[Case]:
    """Cases of the kernels named, or of all; with `matching` those whose shape or name contains it."""
    cases = [case for name in catalogue.chosen(only) for case in catalogue.load(name).cases()]
    return [case for case in cases if matching in f"{case.kernel} {case.shape} {case.dtype}"]


def measure_all(cases: Sequence[Case], ceiling: Ceiling, budget_ms: float) -> Iterator[Row]:
    """A row for each case; it ends early only when a kernel has left the GPU unusable."""
    for case in cases:
        row = measure_case(case, ceiling, budget_ms)
        yield row
        if row.failure is not None and (reason := _lost()) is not None:
            raise HardwareError(
                f"{case.kernel} {case.shape} has left the GPU unusable for this process: {reason}",
                hint="measure the others with --only, and look at that one under compute-sanitizer",
            )
        _forget()


def report(
    origin: RecordOrigin, ceiling: Ceiling, rows: Sequence[Row], old: KernelReport | None = None
) -> KernelReport:
    return KernelReport(ceiling=ceiling, **merged(origin, rows, old, _key, lambda row: row.kernel))


def read(path: Path) -> KernelReport:
    return record.read(path, KernelReport, "kernels")


def _key(row: Row) -> tuple[str, str, str]:
    return row.kernel, row.shape, row.dtype


def _lost() -> str | None:
    """Why nothing can run on the device any more: a bad pointer ends the whole context."""
    torch = sys.modules["torch"]
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return first_line(error)
    return None


def _forget() -> None:
    """Give memory back, and make torch.compile forget: or the next shape would get its dynamic form."""
    torch = sys.modules["torch"]
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
