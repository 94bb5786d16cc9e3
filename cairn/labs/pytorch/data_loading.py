"""When does loading cost nothing? When it happens during the step before.

    one after the other     load + compute for each step
    with one thread ahead   max(load, compute): the shorter hides under the longer       (plus the first load)

Our feeder makes the next batch while the device computes. Here loading and computing are waits of known length, so that
the arithmetic of the overlap is all there is; the samples themselves must be the same in every case.
"""

import time
from typing import Any

from cairn.labs.lab import Check, Outcome, Plot, Words, described
from cairn.labs.workbench import Workbench

SAMPLES = 4


def run(bench: Workbench) -> Outcome:
    compute_s = 0.02
    steps = bench.setting("steps", bench.pick(20, 6))
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
    from cairn.train.next_batches import SourceBatches

    data = Data(sources=["random"], sequence=16, sequences=SAMPLES, microbatch=SAMPLES)
    feeder = SourceBatches(
        _slow_source(load_s / SAMPLES), Train(data=data), 0, 1, torch.device("cpu")
    )
    ids: list[int] = []
    try:
        start = time.perf_counter()
        for step in range(steps):
            for batch in feeder.after(step * SAMPLES):
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


LAB = described(__file__, run)
