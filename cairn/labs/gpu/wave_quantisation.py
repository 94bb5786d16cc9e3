"""Why does one tile more double the time? Work is done in waves.

    tasks over workers:   time = ceil(tasks / workers) x time of one          132 tiles on 132 SMs: 1 wave
                                                                              133 tiles: 2, the second almost empty
On a CPU the workers are threads whose tasks wait for something else (here: the clock), so that the cores of this
machine do not matter. On a GPU they are the programs of our persistent product, one per multiprocessor.
"""

import time
from concurrent.futures import ThreadPoolExecutor

from cairn.labs.lab import Check, Outcome, Plot, Words, described
from cairn.labs.workbench import Workbench


def waves(tasks: int, workers: int) -> int:
    return -(-tasks // workers)


def efficiency(tasks: int, workers: int) -> float:
    """Share of worker time that is used."""
    return tasks / (waves(tasks, workers) * workers)


def run(bench: Workbench) -> Outcome:
    counts, workers, seconds = _on_gpu(bench) if _has_tma(bench) else _on_cpu(bench)
    one = seconds[workers]  # a full wave
    full, spilled, filled = counts[-3:]
    predicted = [(float(c), float(waves(c, workers))) for c in counts]
    measured = [(float(c), seconds[c] / one) for c in counts]
    return Outcome(
        checks=[
            Check(
                what=Words(
                    f"{spilled} tasks over {full}, on {workers} workers",
                    f"{workers} 个执行单元上 {spilled} 个任务与 {full} 个的耗时比",
                ),
                predicted=waves(spilled, workers) / waves(full, workers),
                measured=seconds[spilled] / seconds[full],
                unit="x",
                within=0.35,
            ),
            Check(
                what=Words(
                    f"{filled} tasks over {spilled}: the same waves",
                    f"{filled} 个任务与 {spilled} 个：波数相同",
                ),
                predicted=1.0,
                measured=seconds[filled] / seconds[spilled],
                unit="x",
                within=0.35,
            ),
        ],
        plots=[
            Plot(
                title=Words("Waves", "波"),
                x=Words("tasks", "任务数"),
                y=Words("time, one wave = 1", "耗时（一波 = 1）"),
                lines={"ceil(tasks / workers)": predicted, "measured": measured},
            )
        ],
        notes=[
            Words(
                f"{spilled} tasks use {efficiency(spilled, workers):.0%} of {workers} workers, {full} use "
                f"{efficiency(full, workers):.0%}.",
                f"{spilled} 个任务只用到 {workers} 个执行单元的 {efficiency(spilled, workers):.0%}，{full} "
                f"个用到 {efficiency(full, workers):.0%}。",
            )
        ],
    )


def _has_tma(bench: Workbench) -> bool:
    """Our persistent product moves its tiles by TMA, which Hopper was the first to have."""
    if not bench.on_gpu:
        return False
    import torch

    return torch.cuda.get_device_capability(bench.device) >= (9, 0)


def _on_cpu(bench: Workbench) -> tuple[list[int], int, dict[int, float]]:
    """Threads, four of them by default; the last three counts are one full wave, one task more, and two full waves."""
    workers, each_s = bench.setting("workers", 4), bench.pick(0.03, 0.01)
    counts = [*range(1, workers + 1), workers, workers + 1, 2 * workers]
    seconds = {}
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(time.sleep, [0.0] * workers))  # threads start when they are first needed
        for count in sorted(set(counts)):
            bench.step(f"{count} tasks on {workers} threads")

            def together(count: int = count) -> None:
                list(pool.map(time.sleep, [each_s] * count))

            seconds[count] = bench.time(together, device="cpu", budget_ms=300).p10_s
    return counts, workers, seconds


def _on_gpu(bench: Workbench) -> tuple[list[int], int, dict[int, float]]:
    """Tiles of 128 x 256 in one column: as many as there are multiprocessors, one more, twice as many."""
    import torch

    from cairn.kernels.matmul.epilogue import Epilogue
    from cairn.kernels.matmul.matmul import LARGE, launch

    workers = torch.cuda.get_device_properties(bench.device).multi_processor_count
    counts = [workers // 2, workers, workers, workers + 1, 2 * workers]
    seconds = {}
    for count in sorted(set(counts)):
        bench.step(f"{count} tiles on {workers} multiprocessors")
        rows, k = count * LARGE.block_m, 4096
        a = torch.randn(rows, k, device=bench.device, dtype=torch.bfloat16)
        b = torch.randn(LARGE.block_n, k, device=bench.device, dtype=torch.bfloat16)
        y = torch.empty(rows, LARGE.block_n, device=bench.device, dtype=torch.bfloat16)
        seconds[count] = bench.time(
            lambda a=a, b=b, y=y: launch(a, b, y, Epilogue(), LARGE)
        ).median_s
    return counts, workers, seconds


LAB = described(__file__, run)
