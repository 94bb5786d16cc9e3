"""Why is an int8 addition eight times cheaper than a float64 one? Lanes: a vector register has a fixed width.

    128 bits:   2 x float64 | 4 x float32 | 8 x int16 | 16 x int8      one instruction each
    strided:    every second number: no vector load fits, so it falls back to one number at a time

Everything stays in the first caches, so that memory does not decide. NumPy's loops are compiled with vector
instructions; nothing here depends on how wide they are, only on how many bytes a number has.
"""

from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.workbench import Workbench

COUNT = 1 << 15  # numbers: 3 x 256 KiB in float64, inside a second-level cache
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

    a, b, c = (np.ones(COUNT * stride, dtype=dtype)[::stride] for _ in range(3))

    def burst() -> None:
        for _ in range(20):  # one addition is only a few times the cost of the call
            np.add(a, b, out=c)

    return bench.time(burst, device="cpu").p10_s


def _walk(bench: Workbench) -> tuple[float, float]:
    """The same sum over a matrix along its rows and down its columns."""
    import numpy as np

    bench.step("rows against columns")
    size = bench.pick(2048, 1024)
    matrix = np.ones((size, size), dtype=np.float32)
    along = bench.time(lambda: [row.sum() for row in matrix], device="cpu").p10_s
    down = bench.time(lambda: [column.sum() for column in matrix.T], device="cpu").p10_s
    return along, down


LAB = Lab(
    name="simd",
    area="gpu",
    title=Words("SIMD lanes and layout on a CPU", "CPU 上的 SIMD 通道与数据布局"),
    hypothesis=Words(
        "In cache, additions per second grow with the lanes of a vector register: twice for half the bytes "
        "per number. A layout that breaks the vector (strides, columns) loses that gain.",
        "数据在缓存内时，每秒加法数与向量寄存器的 lane 数成正比：每个数的字节减半，速度翻倍。"
        "打断向量的布局（跨步、按列）会失去这一收益。",
    ),
    run=run,
    causes=(
        Words(
            "the cost of the call itself, which is the same for every type",
            "函数调用开销对各类型相同，拉平了差距",
        ),
        Words(
            "a CPU that loads wide but computes narrow, or was shared with other work",
            "CPU 访存宽而计算窄，或被其他负载占用",
        ),
    ),
    code=("cairn/models/packed_weights.py:Int8", "cairn/labs/gpu/simd.py:run"),
    reading=(
        "Computer Architecture: A Quantitative Approach, chapter on data-level parallelism (2017)",
        "What Every Programmer Should Know About Memory (2007)",
    ),
    questions=(
        Question(
            Words(
                "When does a compiler refuse to vectorise a loop?",
                "编译器在什么情况下无法向量化循环？",
            ),
            Words(
                "When an iteration depends on the one before, when pointers may overlap, when accesses are "
                "strided or indirect, or when the order of float additions must not change.",
                "迭代之间有依赖、指针可能重叠、访问是跨步或间接的，或者不允许改变浮点加法顺序时。",
            ),
        ),
        Question(
            Words("Array of structures or structure of arrays?", "AoS 还是 SoA？"),
            Words(
                "Structure of arrays when one field of many records is processed: a vector load takes 4 or "
                "16 neighbours of that field, and no cache line carries fields that nobody asked for.",
                "批量处理同一字段时用 SoA：一次向量 load 取 4 或 16 个相邻值，缓存行里没有无关字段；"
                "一次要用整条记录时才用 AoS。",
            ),
        ),
        Question(
            Words("How do SIMD and SIMT differ?", "SIMD 与 SIMT 有何不同？"),
            Words(
                "SIMD: one thread, an explicit vector of fixed width. SIMT: 32 scalar threads share an "
                "instruction; hardware masks divergence and coalesces their addresses, so scalar code "
                "vectorises itself.",
                "SIMD 是一个线程显式操作定宽向量；SIMT 是 32 个标量线程共享一条指令，"
                "由硬件处理分支掩码并合并地址，标量代码自动成为向量。",
            ),
        ),
    ),
    seconds=2.0,
)
