"""What lies between `x * y` and the loop that multiplies? The dispatcher: a table from (operation, keys) to a function.

    Python -> aten::mul -> Autograd (records a node) -> CPU or CUDA kernel           about 1 to 5 us, whatever the size

On small tensors that way is all there is, so a model's time is a count of operations. A norm is written three times
in this project: as six operations, as four, and as one kernel on a GPU.
"""

from collections.abc import Callable
from typing import Any

from cairn.labs.gpu._ceiling import ceiling
from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.pytorch._tiny_model import tiny_model
from cairn.labs.workbench import Workbench

PLAIN = ("pow", "mean", "add", "rsqrt", "mul", "mul")
LEAN = ("linalg_vector_norm", "hypot_", "div", "mul_")


def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.kernels.norm.rmsnorm import rmsnorm_reference
    from cairn.models.lean import LeanNorm

    model = tiny_model()
    x = torch.randn(1, model.spec.hidden)
    weight, lean = model.norm.weight.detach(), LeanNorm(model.norm)
    norms = {"plain": lambda: rmsnorm_reference(x, weight, 1e-6), "lean": lambda: lean(x)}
    bench.step("operations of both norms")
    operations = {name: _operations(norm) for name, norm in norms.items()}
    gap = float((norms["plain"]() - norms["lean"]()).abs().max())
    bench.step("times of both")
    with one_thread(), torch.no_grad():
        took = {name: _each(bench, norm) for name, norm in norms.items()}
        six_s, twelve_s = (_each(bench, lambda n=n: _multiply(x, n)) for n in (6, 12))
        recorded_s = _with_gradient(bench, x)
    rows = [[f"{name} norm: {' '.join(operations[name])}", took[name] * 1e6] for name in norms]
    return Outcome(
        checks=[*_counts(operations), *_times(twelve_s / six_s, took["plain"] / took["lean"], gap)],
        table=Table(
            columns=[Words("what", "项目"), Words("us", "us")],
            rows=[
                *rows,
                ["one operation of it", took["plain"] / len(PLAIN) * 1e6],
                ["one addition, calibrated", ceiling(bench.ceilings, "launch") * 1e6],
                ["one operation with autograd recording", recorded_s * 1e6],
            ],
        ),
    )


def _operations(call: Callable[[], object]) -> list[str]:
    """What passes through the dispatcher: aten::mul.Tensor is a mul."""
    import torch

    from cairn.labs.pytorch._watched import Watched

    with torch.no_grad(), Watched() as watched:
        call()
    return [_short(operation) for operation in watched.names]


def _counts(operations: dict[str, list[str]]) -> list[Check]:
    return [
        Check(
            what=Words("operations of the plain norm", "普通 norm 的算子数"),
            predicted=float(len(PLAIN)),
            measured=float(len(operations["plain"])),
            unit="",
        ),
        Check(
            what=Words("operations of the lean norm", "精简 norm 的算子数"),
            predicted=float(len(LEAN)),
            measured=float(len(operations["lean"])),
            unit="",
        ),
    ]


def _times(doubled: float, leaner: float, gap: float) -> list[Check]:
    return [
        Check(
            what=Words(
                "twelve multiplications of one row over six", "单行上十二次乘法与六次的耗时比"
            ),
            predicted=2.0,
            measured=doubled,
            unit="x",
            within=0.3,
        ),
        Check(
            what=Words(
                "plain norm over lean norm, time on one row", "单行上普通与精简 norm 的耗时比"
            ),
            predicted=len(PLAIN) / len(LEAN),
            measured=leaner,
            unit="x",
            kind="at_least",
            within=0.25,
        ),
        Check(
            what=Words("largest difference of their results", "两者结果的最大差"),
            predicted=1e-5,
            measured=gap,
            unit="",
            kind="at_most",
        ),
    ]


def _short(name: str) -> str:
    """aten::mul.Tensor -> mul"""
    return name.partition("::")[2].partition(".")[0]


def _multiply(x: Any, times: int) -> None:
    for _ in range(times):
        x * x


def _each(bench: Workbench, call: Callable[[], object]) -> float:
    """Seconds of one call, out of twenty in a row: few enough to be let alone on a busy machine."""

    def burst() -> None:
        for _ in range(20):
            call()

    return bench.time(burst, device="cpu", budget_ms=300).p10_s / 20


def _with_gradient(bench: Workbench, x: Any) -> float:
    import torch

    with torch.enable_grad():
        tracked = torch.ones(1, 1, requires_grad=True)
        return _each(bench, lambda: x * tracked)


LAB = described(__file__, run)
