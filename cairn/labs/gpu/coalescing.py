"""Memory comes in pieces: what does it cost to use one number of each piece?

    CPU   cache line of 64 bytes       floats 16 apart: a line for each      16 bytes moved per useful byte
    GPU   sector of 32 bytes           floats  8 apart: a sector for each     8 bytes moved per useful byte

On a CPU the same array is summed with growing strides; on a GPU a Triton kernel reads numbers that lie apart. Time
follows the pieces that move, not the numbers that are used.
"""

from cairn.labs.lab import Check, Outcome, Plot, Words, described
from cairn.labs.workbench import Workbench

CPU_STRIDES = (1, 4, 16, 32, 64)
GPU_STRIDES = (1, 2, 4, 8, 16, 32)
LINE, SECTOR, FLOAT = 64, 32, 4


def moved_per_useful(stride: int, piece: int) -> float:
    """Bytes that travel for each byte that is used, when floats lie `stride` apart."""
    return min(stride * FLOAT, piece) / FLOAT


def run(bench: Workbench) -> Outcome:
    if bench.on_gpu:
        strides, piece = GPU_STRIDES, SECTOR
        seconds = {stride: _on_gpu(bench, stride) for stride in strides}
        predicted = _predicted_gpu(seconds[1])
    else:
        strides, piece = CPU_STRIDES, LINE
        cached = {stride: _on_cpu(bench, stride, in_cache=True) for stride in strides}
        seconds = {stride: _on_cpu(bench, stride, in_cache=False) for stride in strides}
        predicted = _predicted_cpu(seconds[1], cached)
    whole = piece // FLOAT
    return Outcome(
        checks=_checks(whole, strides[-1], predicted, seconds),
        plots=[_plot(strides, predicted, seconds)],
    )


def _predicted_gpu(alone: float) -> dict[int, float]:
    """Seconds per number: reading moves more sectors, the gather's writing stays as it is."""
    written = 1.0
    return {
        stride: alone * (moved_per_useful(stride, SECTOR) + written) / (1.0 + written)
        for stride in GPU_STRIDES
    }


def _predicted_cpu(alone: float, cached: dict[int, float]) -> dict[int, float]:
    """Seconds per number: its lines at the rate of a sum side by side, or the loop itself where that is slower."""
    return {
        stride: max(alone * moved_per_useful(stride, LINE), cached[stride])
        for stride in CPU_STRIDES
    }


def _checks(
    whole: int, last: int, predicted: dict[int, float], seconds: dict[int, float]
) -> list[Check]:
    """Both against one number alone; a machine on which distance costs nothing would show 1."""
    return [
        Check(
            what=Words(
                f"time per number {whole} apart, side by side = 1",
                f"间隔 {whole} 的每数耗时（相邻 = 1）",
            ),
            predicted=predicted[whole] / seconds[1],
            measured=seconds[whole] / seconds[1],
            unit="x",
            within=0.4,
        ),
        Check(
            what=Words("further apart is not cheaper", "间隔再大也不会更便宜"),
            predicted=seconds[whole] / seconds[1],
            measured=seconds[last] / seconds[1],
            unit="x",
            kind="at_least",
            within=0.3,
        ),
    ]


def _plot(strides: tuple[int, ...], predicted: dict[int, float], seconds: dict[int, float]) -> Plot:
    return Plot(
        title=Words("What distance costs", "间隔的代价"),
        x=Words("floats apart", "间隔（float 个数）"),
        y=Words("time per number, side by side = 1", "每个数的耗时（相邻 = 1）"),
        lines={
            "predicted": [(float(s), predicted[s] / seconds[1]) for s in strides],
            "measured": [(float(s), seconds[s] / seconds[1]) for s in strides],
        },
        log_x=True,
        log_y=True,
    )


def _on_cpu(bench: Workbench, stride: int, in_cache: bool) -> float:
    """Seconds per number of a sum: over an array several times the last cache, or one that a near cache holds."""
    import numpy as np

    bench.step(f"sum of every {stride}. number" + (", in a cache" if in_cache else ""))
    count = 4096 * stride if in_cache else bench.setting("n", bench.pick(1 << 25, 1 << 24))
    # In a cache, the numbers lie apart within few lines: the loop is the same, and no line comes from memory.
    array = np.ones(min(count, 1 << 16) if in_cache else count, dtype=np.float32)[::stride]
    budget = 60 if in_cache else 300
    return bench.time(array.sum, device="cpu", budget_ms=budget).p10_s / len(array)


def _on_gpu(bench: Workbench, stride: int) -> float:
    import torch

    from cairn.labs.gpu._strided_kernel import gather

    bench.step(f"numbers {stride} apart")
    count = 1 << 25
    x = torch.ones(count * stride, device=bench.device)
    y = torch.empty(count, device=bench.device)
    return bench.time(gather, [(x, y, stride)]).median_s / count


LAB = described(__file__, run)
