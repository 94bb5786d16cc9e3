"""What does it cost to start an operation? At small sizes that is all it costs.

    time of n numbers = launch + 12 n / bandwidth          (an addition: two read, one written, float32)
    the turn          n* = launch x bandwidth / 12         below it, size is free and counting operations is all

On a CPU "launch" is the way through Python and the dispatcher; on a GPU it is that and the driver. There the same
additions are replayed from a CUDA graph, which pays the launch of a node only.
"""

from cairn.hw.ceilings import duration
from cairn.hw.timing import Timing, measure_graph
from cairn.labs.gpu._ceiling import ceiling
from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Words
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


def _per_call(bench: Workbench, count: int) -> Timing:
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


LAB = Lab(
    name="launch-cost",
    area="gpu",
    title=Words("The price of starting an operation", "启动一个算子的代价"),
    hypothesis=Words(
        "An addition takes launch + bytes / bandwidth; below launch x bandwidth / 12 numbers its size does "
        "not matter, and cutting one operation into a hundred costs the difference in launches.",
        "一次加法耗时为“启动 + 字节 / 带宽”；少于“启动×带宽/12”个数时大小无所谓，"
        "把一个算子切成一百个就多付一百次启动。",
    ),
    run=run,
    causes=(
        Words(
            "data that fits into caches, which beat the bandwidth of memory",
            "数据在缓存里，快过内存带宽",
        ),
        Words(
            "a CPU clock or load that differs from when the launch was calibrated",
            "CPU 频率或负载与标定时不同",
        ),
    ),
    code=(
        "cairn/hw/measure_device.py:launch_cost",
        "cairn/hw/roofline.py:floor",
        "cairn/hw/timing.py:measure_graph",
    ),
    reading=(
        "CUDA C++ Programming Guide, CUDA Graphs (2024)",
        "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph "
        "Compilation (2024)",
    ),
    questions=(
        Question(
            Words(
                "A decode step has 400 kernels of 3 us each. What does Python cost?",
                "一次解码有 400 个 3 us 的内核，Python 要花多少？",
            ),
            Words(
                "At about 5 us per launch from Python the host needs 2 ms for 1.2 ms of device work: the GPU "
                "idles. A graph replays the nodes at below 1 us and the device decides again.",
                "Python 每次启动约 5 us，主机要 2 ms，而设备只需 1.2 ms：GPU 在等。用 CUDA graph 重放，"
                "每个节点不到 1 us，又回到设备决定速度。",
            ),
        ),
        Question(
            Words("Which three ways reduce launch cost?", "减少启动开销有哪三种办法？"),
            Words(
                "Fewer operations (fusion), cheaper launches (graphs, programmatic dependent launch), more "
                "work per launch (batching); asynchrony only hides it while the device is busy.",
                "更少的算子（融合）、更便宜的启动（CUDA graph、PDL）、每次启动做更多（批处理）；"
                "异步只在设备忙时才能掩盖它。",
            ),
        ),
        Question(
            Words("How do you see it on a timeline?", "在时间线上怎么看出来？"),
            Words(
                "Gaps between kernels on the GPU row while the CPU row is solid; the launch call of a kernel "
                "starts just before the kernel instead of far ahead.",
                "GPU 行的内核之间有空隙而 CPU 行是满的；内核的 launch 调用紧挨在内核之前，而不是远远领先。",
            ),
        ),
    ),
    seconds=3.0,
)
