"""What lies between `x * y` and the loop that multiplies? The dispatcher: a table from (operation, keys) to a function.

    Python -> aten::mul -> Autograd (records a node) -> CPU or CUDA kernel           about 1 to 5 us, whatever the size

On small tensors that way is all there is, so a model's time is a count of operations. A norm is written three times
in this project: as six operations, as four, and as one kernel on a GPU.
"""

from collections.abc import Callable
from typing import Any

from cairn.labs.gpu._ceiling import ceiling
from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
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
    seen = {name: _operations(norm) for name, norm in norms.items()}
    gap = float((norms["plain"]() - norms["lean"]()).abs().max())
    bench.step("times of both")
    with one_thread(), torch.no_grad():
        took = {name: _each(bench, norm) for name, norm in norms.items()}
        six_s, twelve_s = (_each(bench, lambda n=n: _multiply(x, n)) for n in (6, 12))
        recorded_s = _with_gradient(bench, x)
    rows = [[f"{name} norm: {' '.join(seen[name])}", took[name] * 1e6] for name in norms]
    return Outcome(
        checks=[*_counts(seen), *_times(twelve_s / six_s, took["plain"] / took["lean"], gap)],
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


def _counts(seen: dict[str, list[str]]) -> list[Check]:
    return [
        Check(
            what=Words("operations of the plain norm", "普通 norm 的算子数"),
            predicted=float(len(PLAIN)),
            measured=float(len(seen["plain"])),
            unit="",
        ),
        Check(
            what=Words("operations of the lean norm", "精简 norm 的算子数"),
            predicted=float(len(LEAN)),
            measured=float(len(seen["lean"])),
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


LAB = Lab(
    name="dispatcher",
    area="pytorch",
    title=Words("The dispatcher: time is a count of operations", "dispatcher：耗时就是算子个数"),
    hypothesis=Words(
        "On one row time is the number of operations: twelve take twice as long as six, and a norm of six "
        "takes at "
        "least one and a half times as long as one of four.",
        "在单行上，耗时就是算子个数：十二次是六次的两倍；六个算子的 norm 至少是四个算子的一倍半。",
    ),
    run=run,
    causes=(
        Words("a busy machine in one of the two measurements", "其中一次测量时机器繁忙"),
        Words(
            "operations differ in how much Python and shape arithmetic they need",
            "各算子的 Python 与形状计算开销不同",
        ),
    ),
    code=(
        "cairn/models/lean.py:LeanNorm",
        "cairn/kernels/norm/rmsnorm.py:rmsnorm_reference",
        "cairn/labs/pytorch/_watched.py:Watched",
    ),
    reading=("PyTorch: An Imperative Style, High-Performance Deep Learning Library (2019)",),
    questions=(
        Question(
            Words(
                "Which keys does a multiplication pass on its way?",
                "一次乘法经过哪些 dispatch key？",
            ),
            Words(
                "Modes and functorch if active, Autocast, Autograd (records the node, saves inputs), then "
                "the backend key of its tensors: CPU or CUDA. Each layer removes its key and dispatches again.",
                "若启用则先过 mode 与 functorch，再是 Autocast、Autograd（记录节点、保存输入），"
                "最后是张量的后端 key：CPU 或 CUDA。每层去掉自己的 key 再次分发。",
            ),
        ),
        Question(
            Words(
                "What is the difference between aten::square and aten::pow in a trace?",
                "trace 里为什么 aten::square 变成 aten::pow？",
            ),
            Words(
                "square is composite: it has no kernel of its own and calls pow above autograd, so below it "
                "only pow is seen and only pow needs a gradient.",
                "square 是复合算子，没有自己的内核，在 autograd 之上就调用 pow；往下只看得到 pow，也只有 pow "
                "需要梯度公式。",
            ),
        ),
        Question(
            Words(
                "How does one remove dispatch cost from a decode step?",
                "解码时如何去掉 dispatch 开销？",
            ),
            Words(
                "Fewer and larger operations (fused kernels, joined projections), or none at all: a captured "
                "CUDA graph replays kernels without Python and dispatcher.",
                "更少更大的算子（融合内核、合并投影），或者干脆没有：CUDA graph 重放内核，不经过 Python 和 "
                "dispatcher。",
            ),
        ),
    ),
    seconds=2.0,
)
