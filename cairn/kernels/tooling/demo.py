"""Entry point of `python -m cairn.kernels.cases.NAME`: checks a kernel and shows its rate and the machine's ceiling.

    python -m cairn.kernels.cases.rmsnorm                                       every case: error, time, rate, anchors
    compute-sanitizer python -m cairn.kernels.cases.rmsnorm --check 3           the errors of the 3 smallest cases only

On a GPU every case of the module is checked and timed. Without one its numerics are checked by its tests in the
interpreter, if the sources of the tests are there. Knows no kernel by name.
"""

import importlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cairn.kernels.kernel import Case
from cairn.kernels.tooling.measure import (
    Row,
    first_line,
    measure_case,
    measure_ceiling,
    require_gpu,
)


def demo(module_name: str) -> None:
    """Runs as a program: prints, and leaves with 1 when a case fails."""
    import torch

    name = module_name.rpartition(".")[2]
    count = _asked(module_name, sys.argv[1:])
    if not torch.cuda.is_available():
        sys.exit(_on_cpu(name))
    cases = list(importlib.import_module(module_name).cases())
    if count is None:
        sys.exit(_measure(name, cases))
    smallest = sorted(cases, key=lambda case: case.cost.bytes)
    sys.exit(check(smallest[: count or None]))


def _asked(module_name: str, args: Sequence[str]) -> int | None:
    """Number of cases to check without measuring (0 for all), or None to measure all."""
    usage = f"usage: python -m {module_name} [--check [COUNT]]"
    match args:
        case []:
            return None
        case ["--check"]:
            return 0
        case ["--check", count] if count.isdecimal() and int(count):
            return int(count)
        case ["-h" | "--help"]:
            print(usage)
            sys.exit(0)
        case _:
            print(usage, file=sys.stderr)
            sys.exit(2)


def check(cases: Sequence[Case]) -> int:
    """Errors only, each case once: what a sanitizer can afford."""
    failed = 0
    for case in cases:
        try:
            error = float(case.prepare().error())
            wrong = "" if error <= case.tolerance else f" exceeds {case.tolerance:.1e}"
        except Exception as problem:  # noqa: BLE001  the other cases are checked all the same
            error, wrong = math.nan, f" {first_line(problem)}"
        failed += bool(wrong)
        print(
            f"{case.kernel:<24} {case.shape:<32} {case.dtype:<5} error {error:.1e}{wrong}",
            flush=True,
        )
    return 1 if failed else 0


def line(row: Row) -> str:
    """Format a case in one line: shape, error, rate and comparison."""
    head = f"{row.kernel:<24} {row.shape:<32} {row.dtype:<5}"
    if row.failure is not None:
        return f"{head} FAILED: {row.failure}"
    rate = (
        f"{row.tflops:7.1f} TFLOP/s {row.gbps:7.0f} GB/s {row.fraction_of_ceiling:6.1%} of ceiling"
    )
    anchor = f"{row.ratio_to_anchor:5.2f}x {row.anchor}" if row.anchor else "no anchor"
    return f"{head} error {row.error:.1e} {1e3 * (row.ms or 0):9.1f} us {rate}  {anchor}"


def _measure(name: str, cases: Sequence[Case]) -> int:
    print(f"{name} on {require_gpu()}: {len(cases)} cases")
    ceiling = measure_ceiling({case.dtype for case in cases})
    failed = 0
    for case in cases:
        row = measure_case(case, ceiling)
        failed += row.failure is not None
        print(line(row), flush=True)
    return 1 if failed else 0


def _on_cpu(name: str) -> int:
    tests = interpreted_tests(name)
    if not tests:
        print(f"{name}: no CUDA device here, and no tests to run in Triton's interpreter either")
        print(f"hint: `cairn kernels explain {name}` compiles it for sm_90 without a GPU")
        return 1
    files = ", ".join(path.name for path in tests)
    print(f"{name}: no CUDA device here, so Triton's interpreter runs {files}", flush=True)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    runs = [subprocess.run([*command, path], check=False, env=environment) for path in tests]
    print(f"hint: `cairn kernels explain {name}` shows its machine code; a rate needs a GPU")
    return max(run.returncode for run in runs)


def interpreted_tests(name: str) -> list[Path]:
    """The file of the kernel's own tests, else those that import it; none where only the package is installed."""
    folder = Path(__file__).parents[3] / "tests" / "kernels"
    own = folder / f"interpreted_{name}.py"
    if own.exists():
        return [own]
    imports = re.compile(
        rf"^from cairn\.kernels(\.\w+)?(\.{name} import| import .*\b{name}\b)", re.MULTILINE
    )
    files = sorted(folder.glob("interpreted_*.py"))
    return [path for path in files if imports.search(path.read_text(encoding="utf-8"))]
