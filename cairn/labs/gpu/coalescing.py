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
    else:
        strides, piece = CPU_STRIDES, LINE
        seconds = {stride: _on_cpu(bench, stride) for stride in strides}
    # Reading is 1 of 1 byte at stride one; a GPU's gather writes another, whatever the stride.
    written = 1.0 if bench.on_gpu else 0.0
    predicted = {s: (moved_per_useful(s, piece) + written) / (1.0 + written) for s in strides}
    slower = {s: seconds[s] / seconds[1] for s in strides}
    whole = piece // FLOAT
    return Outcome(
        checks=[
            Check(
                what=Words(
                    f"time per number {whole} apart, side by side = 1",
                    f"间隔 {whole} 的每数耗时（相邻 = 1）",
                ),
                predicted=predicted[whole],
                measured=slower[whole],
                unit="x",
                within=0.35 if bench.on_gpu else 0.7,
            ),
            Check(
                what=Words("further apart is not cheaper", "间隔再大也不会更便宜"),
                predicted=slower[whole],
                measured=slower[strides[-1]],
                unit="x",
                kind="at_least",
                within=0.3,
            ),
        ],
        plots=[
            Plot(
                title=Words("What distance costs", "间隔的代价"),
                x=Words("floats apart", "间隔（float 个数）"),
                y=Words("time per number, side by side = 1", "每个数的耗时（相邻 = 1）"),
                lines={
                    "bytes moved per byte used": [(float(s), predicted[s]) for s in strides],
                    "measured": [(float(s), slower[s]) for s in strides],
                },
                log_x=True,
                log_y=True,
            )
        ],
    )


def _on_cpu(bench: Workbench, stride: int) -> float:
    """Seconds per number of a sum over an array several times the last cache."""
    import numpy as np

    bench.step(f"sum of every {stride}. number")
    array = np.ones(bench.pick(1 << 25, 1 << 24), dtype=np.float32)[::stride]
    return bench.time(array.sum, device="cpu", budget_ms=300).p10_s / len(array)


def _on_gpu(bench: Workbench, stride: int) -> float:
    import torch

    from cairn.labs.gpu._strided_kernel import gather

    bench.step(f"numbers {stride} apart")
    count = 1 << 25
    x = torch.ones(count * stride, device=bench.device)
    y = torch.empty(count, device=bench.device)
    return bench.time(gather, [(x, y, stride)]).median_s / count


LAB = described(__file__, run)
