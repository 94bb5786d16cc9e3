"""Why is an int8 addition eight times cheaper than a float64 one? Lanes: a vector register has a fixed width.

    128 bits:   2 x float64 | 4 x float32 | 8 x int16 | 16 x int8      one instruction each
    strided:    every second number: no vector load fits, so it falls back to one number at a time

Everything stays in the first caches, and arrays of every type have the same bytes, so that memory does not decide.
NumPy's loops are compiled with vector instructions; nothing here depends on how wide they are, only on how many bytes a
number has.
"""

from collections.abc import Callable
from typing import Any

from cairn.labs.interleaved_timing import fastest_in_turn
from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench

BYTES = 1 << 15  # of each array, whatever its type: all of them meet the same cache
CALLS = 20  # of one burst
PAGE = 4096
APART = 1088  # bytes: 17 cache lines
TYPES = ("float64", "float32", "int16", "int8")


def run(bench: Workbench) -> Outcome:
    import numpy as np

    bench.step("additions")
    rates, strided = _additions_per_s(bench)
    sizes = {name: np.dtype(name).itemsize for name in TYPES}
    rows: list[list[str | float]] = [
        [name, size, rates[name] / rates["float64"], 8 / size] for name, size in sizes.items()
    ]
    rows.append(["float32, every second", 4, strided / rates["float64"], "-"])
    by_row, by_column = _walk(bench)
    return Outcome(
        checks=_checks(rates, strided, by_column, by_row),
        table=Table(
            columns=[
                Words("numbers", "数据类型"),
                Words("bytes each", "每个字节数"),
                Words("speed, float64 = 1", "速度（float64 = 1）"),
                Words("by lanes", "按 lane 数预测"),
            ],
            rows=rows,
        ),
    )


def _checks(
    rates: dict[str, float], strided: float, by_column: float, by_row: float
) -> list[Check]:
    return [
        Check(
            what=Words(
                "float32 over float64, additions per second", "float32 与 float64 每秒加法之比"
            ),
            predicted=2.0,
            measured=rates["float32"] / rates["float64"],
            unit="x",
            within=0.3,
        ),
        Check(
            what=Words("int8 over float64, additions per second", "int8 与 float64 每秒加法之比"),
            predicted=8.0,
            measured=rates["int8"] / rates["float64"],
            unit="x",
            within=0.3,
        ),
        Check(
            what=Words(
                "contiguous over strided, same count of numbers", "连续与跨步（同样个数）之比"
            ),
            # Four lanes are lost; loads and stores of single numbers can still run side by side.
            predicted=1.5,
            measured=rates["float32"] / strided,
            unit="x",
            kind="at_least",
        ),
        Check(
            what=Words("walking down columns over along rows", "按列遍历与按行遍历的耗时之比"),
            predicted=1.5,
            measured=by_column / by_row,
            unit="x",
            kind="at_least",
        ),
    ]


def _additions_per_s(bench: Workbench) -> tuple[dict[str, float], float]:
    """Of each type, and of every second float32."""
    import numpy as np

    dense = [_burst(np.dtype(name), 1) for name in TYPES]
    *seconds, strided_s = fastest_in_turn(
        bench.pick(400, 100), *dense, _burst(np.dtype("float32"), 2)
    )
    counts = [CALLS * BYTES / np.dtype(name).itemsize for name in TYPES]
    rates = dict(zip(TYPES, (n / s for n, s in zip(counts, seconds, strict=True)), strict=True))
    return rates, CALLS * BYTES / 4 / strided_s


def _burst(dtype: Any, stride: int) -> Callable[[], None]:
    import numpy as np

    a, b, c = (_numbers(dtype, stride, place) for place in range(3))

    def burst() -> None:
        for _ in range(CALLS):
            np.add(a, b, out=c)

    return burst


def _numbers(dtype: Any, stride: int, place: int) -> Any:
    """Ones in BYTES, or in `stride` times as many; each array begins at a cache line, and elsewhere in its page.

    A load that crosses a cache line is two, and a store that has the last 12 bits of a load's address in common with it
    holds that load up (4K aliasing): where an allocator puts an array would decide what is measured.
    """
    import numpy as np

    nbytes = BYTES * stride
    raw = np.zeros(nbytes + 2 * PAGE, dtype=np.uint8)
    begin = -raw.ctypes.data % PAGE + place * APART
    numbers = raw[begin : begin + nbytes].view(dtype)[::stride]
    numbers[:] = 1
    return numbers


def _walk(bench: Workbench) -> tuple[float, float]:
    """The same sum over a matrix along its rows and down its columns."""
    import numpy as np

    bench.step("rows against columns")
    size = bench.setting("n", bench.pick(2048, 1024))
    matrix = np.ones((size, size), dtype=np.float32)
    along, down = fastest_in_turn(
        bench.pick(20, 5),
        lambda: [row.sum() for row in matrix],
        lambda: [column.sum() for column in matrix.T],
    )
    return along, down


LAB = described(__file__, run)
