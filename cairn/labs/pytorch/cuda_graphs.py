"""What does replaying a graph save? The launches: a node costs less than a microsecond, a launch from Python several.

    eager    n small kernels:   n x launch          the host is the limit, the device idles between
    graph    one replay:        n x node            the same kernels, recorded once

Shapes and addresses are fixed in a graph, so a server keeps one for each size of batch and pads: how much is computed
for padding follows from the sizes that it keeps.
"""

import time
from collections.abc import Callable
from typing import Any

from cairn.labs.gpu._ceiling import ceiling
from cairn.labs.lab import Check, Outcome, Plot, Points, Words, described
from cairn.labs.workbench import Workbench

NO_GPU = Words(
    "Launches and replays are measured on a GPU; here only the rows that a fixed size pads are counted.",
    "启动与重放需要 GPU 才能测量；这里只统计固定尺寸带来的 padding 行。",
)
KERNELS = 200


def run(bench: Workbench) -> Outcome:
    """On a GPU launches and replays as well; the padding of our sizes is a count, which needs none."""
    padding = _padding()
    measured = _on_gpu(bench) if bench.on_gpu else []
    return Outcome(
        checks=[*measured, _rows_for_padding(padding)],
        plots=[
            Plot(
                title=Words("Rows computed for padding", "为 padding 计算的行"),
                x=Words("sequences", "序列数"),
                y=Words("share", "比例"),
                lines={"our sizes of graphs": padding},
            )
        ],
        notes=[] if bench.on_gpu else [NO_GPU],
    )


def _on_gpu(bench: Workbench) -> list[Check]:
    import torch

    x = torch.randn(64, 64, device=bench.device)

    def many() -> None:
        for _ in range(KERNELS):
            x.add_(1e-6)

    bench.step("from Python")
    eager = _seconds(many, bench.pick(30, 10))
    bench.step("from a graph")
    graph = _captured(many)
    replayed = _seconds(graph.replay, bench.pick(30, 10))
    return [*_times(bench, eager, replayed), _same(_same_result(bench))]


def _times(bench: Workbench, eager: float, replayed: float) -> list[Check]:
    launch, node = ceiling(bench.ceilings, "launch"), ceiling(bench.ceilings, "launch_in_graph")
    return [
        Check(
            what=Words(f"{KERNELS} kernels from Python", f"从 Python 启动 {KERNELS} 个 kernel"),
            predicted=KERNELS * launch * 1e6,
            measured=eager * 1e6,
            unit="us",
            within=0.4,
        ),
        Check(
            what=Words(f"{KERNELS} kernels from a graph", f"从 graph 重放 {KERNELS} 个 kernel"),
            predicted=KERNELS * node * 1e6,
            measured=replayed * 1e6,
            unit="us",
            within=0.5,
        ),
    ]


def _same(exact: int) -> Check:
    return Check(
        what=Words("numbers that differ between both", "两者不同的数的个数"),
        predicted=0.0,
        measured=float(exact),
        unit="",
    )


def _rows_for_padding(padding: Points) -> Check:
    return Check(
        what=Words(
            "padding of a decode batch, on average over 1..256",
            "解码批的平均 padding（1..256）",
        ),
        predicted=0.15,
        measured=sum(y for _, y in padding) / len(padding),
        unit="",
        kind="at_most",
    )


def _seconds(call: Callable[[], object], times: int) -> float:
    """Of one call, from the first launch until the device has done it."""
    import torch

    call()
    samples = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - start)
    return sorted(samples)[len(samples) // 2]


def _captured(call: Callable[[], object]) -> Any:
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # warm up: what allocates on its first call must not do so while capturing
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _same_result(bench: Workbench) -> int:
    """A small network on new inputs, eager and replayed."""
    import torch

    weight = torch.randn(256, 256, device=bench.device)
    inputs = torch.randn(16, 256, device=bench.device)
    outputs: list[torch.Tensor] = [inputs]

    def network() -> None:
        outputs[0] = torch.relu(inputs @ weight) @ weight

    graph = _captured(network)
    first_output = outputs[0]
    inputs.copy_(
        torch.randn(16, 256, device=bench.device)
    )  # inputs change in place: addresses may not
    graph.replay()
    replayed = first_output.clone()
    network()
    # The library may choose another algorithm while capturing: equal up to rounding, not to the bit.
    return int((~torch.isclose(replayed, outputs[0], rtol=1e-3, atol=1e-2)).sum())


def _padding() -> list[tuple[float, float]]:
    """Of the rows that a replay computes, those that are padding."""
    from cairn.serve.engine.cuda_graph import decode_sizes

    sizes = decode_sizes(256)
    points = []
    for rows in range(1, 257):
        size = min(size for size in sizes if size >= rows)
        points.append((float(rows), (size - rows) / size))
    return points


LAB = described(__file__, run)
