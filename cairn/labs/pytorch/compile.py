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

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench

SIZES = (3, 4, 5, 6, 7, 9)


class Counting:
    """A backend: how many graphs there were, and how many operations in each."""

    def __init__(self) -> None:
        self.graphs = 0
        self.sizes: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
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
            ("dynamic=False", norm, False),
            ("default", norm, None),
            ("dynamic=True", norm, True),
        ):
            bench.step(f"six sizes, {name}")
            graphs, seconds = _graphs(function, dynamic, SIZES)
            counted[name] = graphs.graphs
            what = f"norm of {len(SIZES)} sizes, {name}"
            rows.append([what, graphs.graphs, graphs.sizes[0], seconds * 1e3])
        bench.step("a number that leaves the graph")
        broken, seconds = _graphs(looks, None, SIZES[:1])
        rows.append(["a branch on .item()", broken.graphs, broken.sizes[0], seconds * 1e3])
    return Outcome(
        checks=_checks(counted, broken.graphs),
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


def _checks(counted: dict[str, int], broken: int) -> list[Check]:
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
            measured=float(broken),
            unit="",
        ),
    ]


def _graphs(
    function: Callable[..., Any], dynamic: bool | None, sizes: tuple[int, ...]
) -> tuple[Counting, float]:
    """The graphs that the calls caused, and how long they took together."""
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
    return backend, seconds


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


LAB = described(__file__, run)
