"""More runners than cores: does the work get done sooner? No, only everybody waits longer.

    C cores, n equal processes:    time of each = max(1, n / C) * time alone        done per second: constant

The machine's throughput stays where it was with one process for each core, and the latency grows with n. Sizing pools
by the cores that may be used is the remedy; our probe, our tokenizer pool and the launcher do it.
"""

from pathlib import Path

from cairn.hw.host import read_cpu
from cairn.labs.lab import Check, Outcome, Plot, Rows, Table, Words, described
from cairn.labs.linux._partner import allowed_cpus, blocks_for, burn_together
from cairn.labs.workbench import Workbench

MOST_CORES = 4  # more would only take longer


def run(bench: Workbench) -> Outcome:
    cpus = allowed_cpus()[:MOST_CORES]
    cores = len(cpus)
    usable = read_cpu(Path("/")).usable_threads or 0
    counts = [cores * factor for factor in bench.pick((1, 2, 4), (1, 3))]
    blocks = blocks_for(bench.pick(0.15, 0.06))
    walls, rates, rows = [], [], []
    for number in counts:
        bench.step(f"{number} processes on {cores} cores")
        burns = burn_together(blocks, [cpus] * number)
        wall = sum(each.wall_s for each in burns) / number
        busy = sum(each.cpu_s for each in burns) / max(each.wall_s for each in burns)
        walls.append(wall)
        rates.append(number * blocks / max(each.wall_s for each in burns))
        pushed = sum(each.pushed for each in burns) / number
        rows.append([number, number / cores, wall * 1e3, rates[-1], busy, pushed])
    most = counts[-1] / counts[0]
    return Outcome(
        checks=[
            Check(
                what=Words("cores busy, the mask as the limit", "占用核数（以掩码为上限）"),
                predicted=cores,
                measured=max(float(row[4]) for row in rows),
                unit="cores",
                kind="at_most",
                within=0.1,
            ),
            Check(
                what=Words(
                    f"time of each, {counts[-1]} over {counts[0]}",
                    f"单个耗时：{counts[-1]} 个比 {counts[0]} 个",
                ),
                predicted=most,
                measured=walls[-1] / walls[0],
                unit="x",
                within=0.4,
            ),
            Check(
                what=Words("cores our probe counts", "探测到的可用核数"),
                predicted=len(allowed_cpus()),
                measured=usable,
                unit="cores",
            ),
        ],
        plots=[_plot(cores, counts, walls)],
        table=_table(rows),
    )


def _plot(cores: int, counts: list[int], walls: list[float]) -> Plot:
    return Plot(
        title=Words("Time of each process", "单个进程耗时"),
        x=Words("processes per core", "每核进程数"),
        y=Words("times alone", "与基准之比"),
        lines={
            "predicted": [(n / cores, n / counts[0]) for n in counts],
            "measured": [(n / cores, w / walls[0]) for n, w in zip(counts, walls, strict=True)],
        },
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("processes", "进程数"),
            Words("per core", "每核"),
            Words("ms each", "单个毫秒"),
            Words("blocks/s in all", "总块/秒"),
            Words("cores busy", "占用核数"),
            Words("pushed off, each", "各被抢占次数"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
