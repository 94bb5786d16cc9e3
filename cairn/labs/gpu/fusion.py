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
from cairn.labs.interleaved_timing import fastest_in_turn
from cairn.labs.lab import Check, Outcome, Table, Words, described
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
    # 64 MiB each: beyond the last cache of most machines
    count = bench.setting("n", bench.pick(1 << 24, 1 << 23))
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
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if process.returncode:
        raise HardwareError(
            f"{compiler} fails: {process.stderr.strip()[:200]}", hint="try it by hand"
        )
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


LAB = described(__file__, run)
