"""Why is an int8 addition eight times cheaper than a float64 one? Lanes: a vector register has a fixed width.

    128 bits:   2 x float64 | 4 x float32 | 8 x int16 | 16 x int8      one instruction each
    strided:    every second number: no vector load fits, so it falls back to one number at a time

Everything stays in the first caches, so that memory does not decide. NumPy's loops are compiled with vector
instructions; nothing here depends on how wide they are, only on how many bytes a number has.
"""

from typing import Any

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench

COUNT = 1 << 14  # numbers: 3 x 128 KiB in float64, inside a second-level cache
APART = 1088  # bytes: 17 cache lines
TYPES = ("float64", "float32", "int16", "int8")


def run(bench: Workbench) -> Outcome:
    import numpy as np

    seconds = {}
    rows = []
    for name in TYPES:
        bench.step(f"addition of {name}")
        seconds[name] = _add_seconds(bench, np.dtype(name), 1)
        size = np.dtype(name).itemsize
        rows.append([name, size, seconds["float64"] / seconds[name], 8 / size])
    bench.step("every second number")
    strided = _add_seconds(bench, np.dtype("float32"), 2)
    rows.append(["float32, every second", 4, seconds["float64"] / strided, "-"])
    by_row, by_column = _walk(bench)
    return Outcome(
        checks=_checks(seconds, strided, by_column, by_row),
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
    seconds: dict[str, float], strided: float, by_column: float, by_row: float
) -> list[Check]:
    return [
        Check(
            what=Words(
                "float32 over float64, additions per second", "float32 与 float64 每秒加法之比"
            ),
            predicted=2.0,
            measured=seconds["float64"] / seconds["float32"],
            unit="x",
            within=0.45,
        ),
        Check(
            what=Words("int8 over float64, additions per second", "int8 与 float64 每秒加法之比"),
            predicted=8.0,
            measured=seconds["float64"] / seconds["int8"],
            unit="x",
            within=0.5,
        ),
        Check(
            what=Words(
                "contiguous over strided, same count of numbers", "连续与跨步（同样个数）之比"
            ),
            # Four lanes are lost; loads and stores of single numbers can still run side by side.
            predicted=1.5,
            measured=strided / seconds["float32"],
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


def _add_seconds(bench: Workbench, dtype: Any, stride: int) -> float:
    import numpy as np

    a, b, c = (_numbers(dtype, stride, place) for place in range(3))

    def burst() -> None:
        for _ in range(20):  # one addition is only a few times the cost of the call
            np.add(a, b, out=c)

    return bench.time(burst, device="cpu").p10_s


def _numbers(dtype: Any, stride: int, place: int) -> Any:
    """COUNT ones, so far apart in memory; each array begins elsewhere in its page.

    A store that has the last 12 bits of a load's address in common with it holds that load up (4K aliasing), and large
    arrays all begin where a page does.
    """
    import numpy as np

    skipped = place * APART // np.dtype(dtype).itemsize
    return np.ones(skipped + COUNT * stride, dtype=dtype)[skipped::stride]


def _walk(bench: Workbench) -> tuple[float, float]:
    """The same sum over a matrix along its rows and down its columns."""
    import numpy as np

    bench.step("rows against columns")
    size = bench.setting("n", bench.pick(2048, 1024))
    matrix = np.ones((size, size), dtype=np.float32)
    along = bench.time(lambda: [row.sum() for row in matrix], device="cpu").p10_s
    down = bench.time(lambda: [column.sum() for column in matrix.T], device="cpu").p10_s
    return along, down


LAB = described(__file__, run)
