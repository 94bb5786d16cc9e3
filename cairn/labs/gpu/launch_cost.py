"""What does it cost to start an operation? At small sizes that is all it costs.

    time of n numbers = launch + 12 n / bandwidth          (an addition: two read, one written, float32)
    the turn          n* = launch x bandwidth / 12         below it, size is free and counting operations is all

On a CPU "launch" is the way through Python and the dispatcher; on a GPU it is that and the driver. There the same
additions are replayed from a CUDA graph, which pays the launch of a node only.
"""

from cairn.hw.ceilings import duration
from cairn.hw.timing import CallTiming, measure_graph
from cairn.labs.gpu._ceiling import ceiling
from cairn.labs.lab import Check, Outcome, Plot, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

BYTES = 12.0
MANY = 100


def run(bench: Workbench) -> Outcome:
    launch, bandwidth = ceiling(bench.ceilings, "launch"), ceiling(bench.ceilings, "copy")
    turn = launch * bandwidth / BYTES
    powers = range(4, bench.pick(25, 21), bench.pick(2, 4))
    timings = {}
    with one_thread():
        for power in powers:
            bench.step(f"addition of {1 << power:,} numbers")
            timings[1 << power] = _per_call(bench, 1 << power)
        small, large = 1 << 4, 1 << (16 if not bench.on_gpu else 22)
        many = MANY * _per_call(bench, large // MANY).p10_s
        once = _per_call(bench, large).p10_s
    seconds = {count: timing.p10_s for count, timing in timings.items()}
    checks = [
        Check(
            what=Words("one addition of 16 numbers", "16 个数的一次加法"),
            predicted=launch * 1e6,
            measured=seconds[small] * 1e6,
            unit="us",
            within=0.5,
        ),
        Check(
            # The same bytes either way, wherever they come from: what is left is the difference in launches.
            what=Words(
                f"{MANY} additions of a part, beyond one of the whole",
                f"{MANY} 次分块加法比一次整体加法多花的时间",
            ),
            predicted=(MANY - 1) * launch * 1e6,
            measured=(many - once) * 1e6,
            unit="us",
            within=0.5,
        ),
        *(_graph(bench) if bench.on_gpu else []),
    ]
    return Outcome(
        checks=checks,
        plots=[_plot(launch, bandwidth, seconds)],
        notes=[
            Words(
                f"Below about {turn:,.0f} numbers an addition costs its launch.",
                f"少于约 {turn:,.0f} 个数时，一次加法的代价就是启动。",
            )
        ],
        calibrates={"launch": duration(timings[small], "lab launch-cost, one of 200 additions")},
    )


def _plot(launch: float, bandwidth: float, seconds: dict[int, float]) -> Plot:
    return Plot(
        title=Words("Launch, then bytes", "先是启动开销，再是字节"),
        x=Words("numbers", "元素个数"),
        y=Words("us", "us"),
        lines={
            "launch + bytes / bandwidth": [
                (float(n), _model(n, launch, bandwidth) * 1e6) for n in seconds
            ],
            "measured": [(float(n), s * 1e6) for n, s in seconds.items()],
        },
        log_x=True,
        log_y=True,
    )


def _model(count: int, launch: float, bandwidth: float) -> float:
    return launch + BYTES * count / bandwidth


def _per_call(bench: Workbench, count: int) -> CallTiming:
    """Time of one of many additions in a row, until all are done: launches cannot hide."""
    import torch

    a, b, out = (torch.ones(count, device=bench.device) for _ in range(3))
    # Short bursts: on a busy CPU a long one is interrupted, and its time is no longer that of the addition.
    times = 200 if count < (1 << 18 if bench.on_gpu else 1 << 14) else 4

    def burst() -> None:
        for _ in range(times):
            torch.add(a, b, out=out)
        if bench.on_gpu:
            torch.cuda.synchronize()

    return bench.time(burst, device="cpu", budget_ms=150).per(times)


def _graph(bench: Workbench) -> list[Check]:
    import torch

    node = bench.ceilings.launch_in_graph
    if node is None:
        return []
    bench.step("the same additions in a CUDA graph")
    a, b, out = (torch.ones(16, device=bench.device) for _ in range(3))
    timing = measure_graph(lambda: torch.add(a, b, out=out), device=bench.device, budget_ms=100)
    return [
        Check(
            what=Words("one addition as a node of a graph", "作为 CUDA graph 节点的一次加法"),
            predicted=node.value * 1e6,
            measured=timing.median_s * 1e6,
            unit="us",
            within=0.4,
        )
    ]


LAB = described(__file__, run)
