"""Memory comes in pieces: what does it cost to use one number of each piece?

    CPU   cache line of 64 bytes       floats 16 apart: a line for each      16 bytes moved per useful byte
    GPU   sector of 32 bytes           floats  8 apart: a sector for each     8 bytes moved per useful byte

On a CPU the same array is summed with growing strides; on a GPU a Triton kernel reads numbers that lie apart. Time
follows the pieces that move, not the numbers that are used.
"""

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Words
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


LAB = Lab(
    name="coalescing",
    area="gpu",
    title=Words(
        "Coalescing: pay for pieces, not for numbers", "合并访存：按块付费，而不是按数付费"
    ),
    hypothesis=Words(
        "Reading one float of each 64-byte line (CPU) or 32-byte sector (GPU) costs as much as reading all "
        "of it: 16 or 8 times as long per number as neighbours do.",
        "每条 64 字节缓存行（CPU）或 32 字节扇区（GPU）只用一个 float，与读完整块一样贵："
        "每个数的耗时是相邻读取的 16 倍或 8 倍。",
    ),
    run=run,
    causes=(
        Words(
            "stride 1 was bound by additions rather than by memory, so the ratio is smaller",
            "步长为 1 时受加法而非内存限制，比值因此偏小",
        ),
        Words(
            "prefetchers give up at long strides and leave the latency of each miss",
            "步长太大时预取失效，暴露每次未命中的延迟",
        ),
    ),
    code=(
        "cairn/labs/gpu/_strided_kernel.py:gather",
        "cairn/kernels/norm/rows.py:layout",
        "cairn/kernels/tooling/explain.py:accesses",
    ),
    reading=(
        "CUDA C++ Best Practices Guide, coalesced access to global memory (2024)",
        "What Every Programmer Should Know About Memory (2007)",
    ),
    questions=(
        Question(
            Words(
                "What does a warp's load look like to the memory system?",
                "一个 warp 的 load 在内存系统看来是什么？",
            ),
            Words(
                "32 addresses are merged into the 32-byte sectors that they touch: 4 sectors for 32 "
                "neighbouring floats, 32 sectors when each lies in another one, an eightfold traffic.",
                "32 个地址合并成它们触及的 32 字节扇区：32 个相邻 float 只需 4 个扇区；若各在一个扇区则要 32 "
                "个，流量是 8 倍。",
            ),
        ),
        Question(
            Words(
                "How do you transpose a matrix without uncoalesced access?",
                "如何转置矩阵而不产生非合并访问？",
            ),
            Words(
                "Read a tile by rows into shared memory, write it by columns from there: both global "
                "accesses are contiguous; pad or swizzle the tile against bank conflicts.",
                "按行把 tile 读入 shared memory，再按列写出：两次全局访问都连续；用 padding 或 swizzle 避免 "
                "bank conflict。",
            ),
        ),
        Question(
            Words("Where do you see it in a profiler?", "在 profiler 里怎么看出来？"),
            Words(
                "Nsight Compute: sectors per request far above 4 for 32-bit loads, memory throughput high "
                "while useful bandwidth is low; in SASS, LDG.E.32 where LDG.E.128 would fit.",
                "Nsight Compute 中 32 位 load 的 sectors/request 远高于 4，内存吞吐高而有效带宽低；SASS 里是 "
                "LDG.E 而不是 LDG.E.128。",
            ),
        ),
    ),
    seconds=4.0,
)
