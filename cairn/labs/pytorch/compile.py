"""When does torch.compile compile again? Whenever something that it took for granted changes.

    dynamic=False      every size is a constant: six sizes, six graphs
    the default        the second size makes the dimension a symbol: two graphs, whatever comes after
    dynamic=True       a symbol from the start: one graph
    .item() inside     a number leaves the graph: it is cut in two, and Python runs in between

Only the front end (Dynamo) is at work: the "backend" counts the graphs it is given and runs them as they are, so that
nothing is compiled to machine code and no compiler is needed.
"""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.workbench import Workbench

SIZES = (3, 4, 5, 6, 7, 9)


class Counting:
    """A backend: how many graphs there were, and how many operations in each."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.sizes.append(sum(node.op.startswith("call_") for node in graph.graph.nodes))
        return graph.forward


def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.kernels.norm.rmsnorm import rmsnorm_reference

    weight = torch.ones(16)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return rmsnorm_reference(x, weight, 1e-6)

    def looks(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y + 1 if y.sum().item() > 0 else y - 1

    rows, counted = [], {}
    with _quiet():
        for name, function, dynamic in (
            ("dynamic=False", norm, False), ("default", norm, None), ("dynamic=True", norm, True),
        ):  # fmt: skip
            bench.step(f"six sizes, {name}")
            graphs, seconds = _graphs(function, dynamic, SIZES)
            counted[name] = len(graphs)
            rows.append(
                [f"norm of {len(SIZES)} sizes, {name}", len(graphs), graphs[0], seconds * 1e3]
            )
        bench.step("a number that leaves the graph")
        graphs, seconds = _graphs(looks, None, SIZES[:1])
        rows.append(["a branch on .item()", len(graphs), graphs[0], seconds * 1e3])
    return Outcome(
        checks=_checks(counted, graphs),
        table=Table(
            columns=[
                Words("what", "情形"),
                Words("graphs", "图数"),
                Words("operations in the first", "第一个图的算子数"),
                Words("ms to capture and run", "捕获并运行的 ms"),
            ],
            rows=rows,
        ),
    )


def _checks(counted: dict[str, int], graphs: list[int]) -> list[Check]:
    return [
        Check(
            what=Words("graphs for six sizes, dynamic=False", "六种形状、dynamic=False 的图数"),
            predicted=float(len(SIZES)),
            measured=float(counted["dynamic=False"]),
            unit="",
        ),
        Check(
            what=Words("graphs for six sizes by default", "六种形状、默认设置的图数"),
            predicted=2.0,
            measured=float(counted["default"]),
            unit="",
        ),
        Check(
            what=Words("graphs for six sizes, dynamic=True", "六种形状、dynamic=True 的图数"),
            predicted=1.0,
            measured=float(counted["dynamic=True"]),
            unit="",
        ),
        Check(
            what=Words(
                "graphs of a function with .item() in the middle", "中间有 .item() 的函数的图数"
            ),
            predicted=2.0,
            measured=float(len(graphs)),
            unit="",
        ),
    ]


def _graphs(
    function: Callable[..., Any], dynamic: bool | None, sizes: tuple[int, ...]
) -> tuple[list[int], float]:
    """Operations of each graph that the calls caused, and how long they took together."""
    import torch

    torch._dynamo.reset()
    backend = Counting()
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    start = time.perf_counter()
    for size in sizes:
        x = torch.ones(size, 16)
        torch.testing.assert_close(compiled(x), function(x))
    seconds = time.perf_counter() - start
    torch._dynamo.reset()
    return backend.sizes, seconds


@contextmanager
def _quiet() -> Generator[None]:
    """Dynamo warns of the graph break that the lab is about."""
    log = logging.getLogger("torch._dynamo")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


LAB = Lab(
    name="compile",
    area="pytorch",
    title=Words("torch.compile: graphs, guards, recompiles", "torch.compile：图、guard 与重编译"),
    hypothesis=Words(
        "Six input sizes compile six graphs when sizes are constants, two by default, one when they are "
        "symbols; a number that Python looks at cuts a graph in two.",
        "六种输入形状：形状当常量要编译六个图，默认两个，当符号只要一个；Python 看一个数就把图切成两段。",
    ),
    run=run,
    causes=(
        Words(
            "another version of torch with other rules for dynamic shapes",
            "torch 版本不同，动态形状规则不同",
        ),
        Words(
            "TORCH_COMPILE or TORCHDYNAMO variables in the environment",
            "环境里设置了 TORCH_COMPILE 或 TORCHDYNAMO 变量",
        ),
    ),
    code=(
        "cairn/kernels/norm/rmsnorm.py:rmsnorm_reference",
        "cairn/kernels/anchors.py:compiled",
        "cairn/labs/pytorch/compile.py:Counting",
    ),
    reading=(
        "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph "
        "Compilation (2024)",
    ),
    questions=(
        Question(
            Words("What is a guard?", "什么是 guard？"),
            Words(
                "A check that runs before each call: types, shapes, flags and Python values that the graph "
                "was specialised on. If one fails, another compiled graph is tried, else it compiles anew, "
                "up to a limit (8).",
                "每次调用前的检查：图所特化的类型、形状、标志和 Python 值。不满足就试其他已编译的图，"
                "否则重编译，到上限（8）为止。",
            ),
        ),
        Question(
            Words(
                "A job is slow for its first hundred steps and then fine. What do you look for?",
                "任务前一百步慢、之后正常，你查什么？",
            ),
            Words(
                "Recompiles: TORCH_LOGS=recompiles names the guard that failed. Often a Python int that "
                "changes (step, length) or a last batch of another size; mark it dynamic or pad.",
                "重编译：TORCH_LOGS=recompiles 会指出失败的 guard。常见是变化的 Python 整数（步数、长度）"
                "或尺寸不同的最后一批；标为动态或做 padding。",
            ),
        ),
        Question(
            Words("What do graph breaks cost?", "graph break 的代价是什么？"),
            Words(
                "No fusion across the cut, guards and Python between the parts, and no CUDA graph over the "
                "whole. Few breaks at the ends are harmless, one inside every layer is not.",
                "断点两侧不能融合，中间还要跑 guard 和 Python，也无法整体用 CUDA graph。首尾几个无妨，"
                "每层里一个就不行。",
            ),
        ),
    ),
    seconds=6.0,
)
