"""Why does a fused operation win though it computes the same? It touches memory less often.

    CPU   y = x + c, four times over:   four passes over memory against one loop that keeps the number in a register
    GPU   layer norm as nine operations of torch against our kernel, which reads a row once and writes it once

On a CPU both forms are C, compiled here with the same compiler, so that bytes are all that differs. On a GPU the bytes
of the plain form are counted while it runs; those of the kernel are its stated cost.
"""

import ctypes
import subprocess
from collections.abc import Callable
from typing import Any

from cairn.core.errors import HardwareError
from cairn.labs.gpu._in_turn import fastest_in_turn
from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.needs import c_compiler
from cairn.labs.workbench import Workbench

OPERATIONS = 4
SOURCE = """
void one(float *y, const float *x, long n) { for (long i = 0; i < n; i++) y[i] = x[i] + 0.1f; }
void all(float *y, const float *x, long n) {
    for (long i = 0; i < n; i++) {
        float v = x[i];
        for (int k = 0; k < OPERATIONS; k++) v = v + 0.1f;
        y[i] = v;
    }
}
"""


def run(bench: Workbench) -> Outcome:
    return _layernorm(bench) if bench.on_gpu else _loops(bench)


def _loops(bench: Workbench) -> Outcome:
    import numpy as np

    bench.step("compiling two loops")
    library = _compiled(bench)
    count = bench.pick(1 << 24, 1 << 23)  # 64 MiB each: beyond the last cache of most machines
    x = np.random.default_rng(0).random(count, dtype=np.float32)
    plain, fused, spare = (np.zeros_like(x) for _ in range(3))

    for source in (x, *[plain] * (OPERATIONS - 1)):
        _call(library.one, plain, source)
    bench.step("one pass of four against all in one")
    # Calls that should take equally long: on a busy machine the longer of two is interrupted more often.
    one, fast = fastest_in_turn(
        bench.pick(40, 15),
        lambda: _call(library.one, spare, x),
        lambda: _call(library.all, fused, x),
    )
    slow = OPERATIONS * one
    moved = 2.0 * x.nbytes
    return _outcome(
        [OPERATIONS, OPERATIONS * moved, slow],
        [1, moved, fast],
        float(abs(plain - fused).max()),
        0.5,
    )


def _call(function: Any, y: Any, x: Any) -> None:
    function(ctypes.c_void_p(y.ctypes.data), ctypes.c_void_p(x.ctypes.data), ctypes.c_long(len(x)))


def _compiled(bench: Workbench) -> ctypes.CDLL:
    compiler = c_compiler()
    if compiler is None:
        raise HardwareError("no C compiler is on the path", hint="install gcc or clang")
    source, library = bench.folder / "loops.c", bench.folder / "loops.so"
    source.write_text(SOURCE.replace("OPERATIONS", str(OPERATIONS)))
    # Floats may not be regrouped: both forms are equal to the bit.
    flags = ["-O3", "-shared", "-fPIC"]
    command = [compiler, *flags, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise HardwareError(f"{compiler} fails: {done.stderr.strip()[:200]}", hint="try it by hand")
    return ctypes.CDLL(str(library))


def _layernorm(bench: Workbench) -> Outcome:
    import torch

    from cairn.kernels.norm.layernorm import cost, layernorm, layernorm_reference
    from cairn.labs.gpu._traffic import Traffic

    rows, columns = 16384, 4096
    x = torch.randn(rows, columns, device=bench.device)
    weight, bias = (torch.randn(columns, device=bench.device) for _ in range(2))
    with Traffic() as traffic:
        plain = layernorm_reference(x, weight, bias, 1e-5)
    error = float((plain - layernorm(x, weight, bias)).abs().max())
    bench.step("nine operations")
    slow = _seconds(bench, lambda: layernorm_reference(x, weight, bias, 1e-5))
    bench.step("one kernel")
    fast = _seconds(bench, lambda: layernorm(x, weight, bias))
    least = cost(rows, columns, element_bytes=4).bytes
    return _outcome(
        [len(traffic.operations), float(traffic.bytes), slow], [1, least, fast], error, 0.35
    )


def _seconds(bench: Workbench, call: Callable[[], object]) -> float:
    return bench.time(call).median_s


def _outcome(plain: list[float], fused: list[float], error: float, within: float) -> Outcome:
    rows = [
        [name, count, moved / 2**20, seconds * 1e3, moved / seconds / 1e9]
        for name, (count, moved, seconds) in (("plain", plain), ("fused", fused))
    ]
    return Outcome(
        checks=[
            Check(
                what=Words("plain over fused, time", "未融合与融合的耗时比"),
                predicted=plain[1] / fused[1],
                measured=plain[2] / fused[2],
                unit="x",
                within=within,
            ),
            Check(
                what=Words("largest difference of the results", "结果的最大差"),
                predicted=1e-4,
                measured=error,
                unit="",
                kind="at_most",
            ),
        ],
        table=Table(
            columns=[
                Words("form", "形式"),
                Words("operations", "算子数"),
                Words("MiB moved", "搬运 MiB"),
                Words("ms", "ms"),
                Words("GB/s", "GB/s"),
            ],
            rows=rows,
        ),
    )


LAB = Lab(
    name="fusion",
    area="gpu",
    title=Words("Fusion: fewer trips to memory", "算子融合：少跑几趟内存"),
    hypothesis=Words(
        "Written as separate operations a chain moves several times the bytes of the fused form and takes "
        "longer by about that ratio, though the arithmetic is the same.",
        "同样的运算写成多个独立算子，搬运的字节是融合形式的数倍，耗时也大约按这个比例增加，尽管运算量相同。",
    ),
    run=run,
    causes=(
        Words(
            "intermediate results stayed in the last-level cache and were cheaper than counted",
            "中间结果留在末级缓存里，比计数的便宜",
        ),
        Words(
            "a busy machine, or a core that computes slower than its memory delivers",
            "机器繁忙，或核心的计算比内存供数还慢",
        ),
    ),
    code=(
        "cairn/kernels/norm/layernorm.py:layernorm",
        "cairn/kernels/norm/layernorm.py:cost",
        "cairn/kernels/norm/rmsnorm.py:add_rmsnorm",
        "cairn/labs/gpu/_traffic.py:Traffic",
    ),
    reading=(
        "Data Movement Is All You Need: A Case Study on Optimizing Transformers (2021)",
        "The Deep Learning Compiler: A Comprehensive Survey (2020)",
    ),
    questions=(
        Question(
            Words(
                "Which operations fuse well, and which do not?", "哪些算子适合融合，哪些不适合？"
            ),
            Words(
                "Elementwise chains, row reductions and epilogues of products: the data is already in "
                "registers. Two large products do not: the second needs whole rows of the first, which do "
                "not fit on chip.",
                "逐元素链、行归约和矩阵乘的 epilogue 适合：数据已在寄存器里。两个大矩阵乘不适合："
                "第二个要用第一个的整行，片上放不下。",
            ),
        ),
        Question(
            Words(
                "What is the best speedup that fusing a chain of k elementwise operations can give?",
                "融合 k 个逐元素算子最多能快多少？",
            ),
            Words(
                "Each reads and writes N numbers: 2kN becomes 2N, so k times, as long as memory is the limit "
                "and nothing else needs the intermediate results; plus k - 1 launches saved.",
                "每个算子读写 N 个数：2kN 变成 2N，即 k 倍，前提是受访存限制且没人要中间结果；另外省下 k − 1 "
                "次启动。",
            ),
        ),
        Question(
            Words(
                "Why does attention need more than fusing elementwise operations?",
                "为什么注意力的融合不只是逐元素融合？",
            ),
            Words(
                "Softmax needs a whole row before the second product can start. Online softmax makes the "
                "reduction incremental; only then can both products and the softmax share one pass.",
                "softmax 要有整行才能开始第二个乘法；online softmax 把归约变成增量式，两个乘法与 softmax "
                "才能在一趟里完成。",
            ),
        ),
    ),
    needs=("gpu or compiler",),
    seconds=3.0,
)
