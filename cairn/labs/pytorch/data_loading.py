"""When does loading cost nothing? When it happens during the step before.

    one after the other     load + compute for each step
    with one thread ahead   max(load, compute): the shorter hides under the longer       (plus the first load)

Our feeder makes the next batch while the device computes. Here loading and computing are waits of known length, so that
the arithmetic of the overlap is all there is; the samples themselves must be the same in every case.
"""

import time
from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Words
from cairn.labs.workbench import Workbench

SAMPLES = 4


def run(bench: Workbench) -> Outcome:
    compute_s = 0.02
    steps = bench.pick(20, 6)
    points: list[tuple[float, float, float]] = []
    wrong = 0
    for load_s in bench.pick((0.004, 0.01, 0.02, 0.04), (0.01, 0.04)):
        bench.step(f"loading takes {load_s * 1e3:.0f} ms, a step {compute_s * 1e3:.0f} ms")
        overlapped, ids = _feed(bench, load_s, compute_s, steps)
        wrong += ids != list(range(steps * SAMPLES))
        predicted = (load_s + steps * max(load_s, compute_s)) / steps
        points.append((load_s * 1e3, predicted * 1e3, overlapped / steps * 1e3))
    quickest, slowest = points[0], points[-1]
    return Outcome(
        checks=[
            Check(
                what=Words(
                    "step when loading is shorter than computing", "加载比计算短时的每步耗时"
                ),
                predicted=quickest[1],
                measured=quickest[2],
                unit="ms",
                within=0.25,
            ),
            Check(
                what=Words("step when loading is longer", "加载更长时的每步耗时"),
                predicted=slowest[1],
                measured=slowest[2],
                unit="ms",
                within=0.25,
            ),
            Check(
                what=Words(
                    "runs with samples lost, repeated or out of order", "样本丢失、重复或乱序的次数"
                ),
                predicted=0.0,
                measured=float(wrong),
                unit="",
            ),
        ],
        plots=[_plot(points, compute_s)],
    )


def _plot(points: list[tuple[float, float, float]], compute_s: float) -> Plot:
    return Plot(
        title=Words("Loading under computing", "加载藏在计算之下"),
        x=Words("ms to load", "加载 ms"),
        y=Words("ms per step", "每步 ms"),
        lines={
            "max(load, compute)": [(x, y) for x, y, _ in points],
            "one after the other": [(x, x + compute_s * 1e3) for x, _, _ in points],
            "measured": [(x, y) for x, _, y in points],
        },
    )


def _feed(bench: Workbench, load_s: float, compute_s: float, steps: int) -> tuple[float, list[int]]:
    """Seconds of all steps, and the samples in the order in which they came."""
    import torch

    from cairn.train.config import Data, Train
    from cairn.train.feeder import Feeder

    data = Data(sources=["random"], sequence=16, sequences=SAMPLES, microbatch=SAMPLES)
    feeder = Feeder(_slow_source(load_s / SAMPLES), Train(data=data), 0, 1, torch.device("cpu"))
    ids: list[int] = []
    try:
        start = time.perf_counter()
        for step in range(steps):
            for batch in feeder.batches(step * SAMPLES):
                ids += batch.ids
            time.sleep(compute_s)
        return time.perf_counter() - start, ids
    finally:
        feeder.close()


def _slow_source(each_s: float) -> Any:
    from cairn.train.random_tokens import RandomTokens

    class Slow(RandomTokens):
        """Samples that take a while, as from a disk."""

        def batch(self, number: int) -> Any:
            time.sleep(each_s)
            return super().batch(number)

    return Slow(64, 16)


LAB = Lab(
    name="data-loading",
    area="pytorch",
    title=Words("Data loading under computation", "数据加载与计算重叠"),
    hypothesis=Words(
        "With one batch ahead a step takes max(load, compute), not their sum; loading costs nothing until it "
        "is the longer one.",
        "提前准备一个 batch 时，每步耗时为 max(加载, 计算) 而不是两者之和；加载在变成较长者之前不花钱。",
    ),
    run=run,
    causes=(
        Words("a busy machine: a wait of 4 ms may last 6", "机器繁忙：4 ms 的等待可能变成 6 ms"),
        Words(
            "a batch that takes long to make in Python, where the two threads share one lock",
            "批次在 Python 里构造得太久，而两个线程共用一把 GIL",
        ),
    ),
    code=(
        "cairn/train/feeder.py:Feeder",
        "cairn/train/data/source.py:share",
        "cairn/train/data/batch.py:Batch",
    ),
    reading=("Analyzing and Mitigating Data Stalls in DNN Training (2021)",),
    questions=(
        Question(
            Words(
                "When are worker processes needed instead of a thread?",
                "什么时候要用 worker 进程而不是线程？",
            ),
            Words(
                "When making a sample is Python or holds the GIL (decoding, tokenizing): threads then take "
                "turns with the training loop. Reading a memory-mapped file or C code that lets go needs "
                "only a thread.",
                "当做样本是 Python 计算或占着 GIL（解码、分词）时：线程会和训练循环抢锁。读 mmap "
                "文件或会释放 GIL 的 C 代码用线程就够。",
            ),
        ),
        Question(
            Words("How many workers does a job need?", "需要多少个 worker？"),
            Words(
                "ceil(seconds to make a batch / seconds of a step), plus a little for variance. More only "
                "costs memory and file handles.",
                "ceil(做一个 batch 的秒数 / 一步的秒数)，再加一点余量；更多只会占内存和文件句柄。",
            ),
        ),
        Question(
            Words(
                "Why is a sample here a pure function of its number?",
                "为什么这里的样本是其编号的纯函数？",
            ),
            Words(
                "The state of the data in a checkpoint is then one integer, any number of ranks can resume "
                "from it, and prefetching a wrong guess costs nothing but the guess.",
                "这样检查点里的数据状态只是一个整数，任意 rank 数都能续训，预取猜错也只浪费那一次。",
            ),
        ),
    ),
    seconds=3.0,
)
