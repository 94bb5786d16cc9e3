"""More runners than cores: does the work get done sooner? No, only everybody waits longer.

    C cores, n equal processes:    time of each = max(1, n / C) * time alone        done per second: constant

The machine's throughput stays where it was with one process for each core, and the latency grows with n. Sizing pools
by the cores that may be used is the remedy; our probe, our tokenizer pool and the launcher do it.
"""

from pathlib import Path

from cairn.hw.host import read_cpu
from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Rows, Table, Words
from cairn.labs.linux._partner import allowed_cpus, blocks_for, burn_together
from cairn.labs.workbench import Workbench

MOST_CORES = 4  # more would only take longer


def run(bench: Workbench) -> Outcome:
    cpus = allowed_cpus()[:MOST_CORES]
    cores = len(cpus)
    seen = read_cpu(Path("/")).usable_threads or 0
    counts = [cores * factor for factor in bench.pick((1, 2, 4), (1, 3))]
    blocks = blocks_for(bench.pick(0.15, 0.06))
    walls, rates, rows = [], [], []
    for number in counts:
        bench.step(f"{number} processes on {cores} cores")
        found = burn_together(blocks, [cpus] * number)
        wall = sum(each.wall_s for each in found) / number
        busy = sum(each.cpu_s for each in found) / max(each.wall_s for each in found)
        walls.append(wall)
        rates.append(number * blocks / max(each.wall_s for each in found))
        pushed = sum(each.pushed for each in found) / number
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
                measured=seen,
                unit="cores",
            ),
        ],
        plots=[
            _plot(cores, counts, walls)
        ],
        table=_table(rows),
    )  # fmt: skip


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


LAB = Lab(
    name="oversubscription",
    area="linux",
    title=Words("More runners than cores", "进程多于核"),
    hypothesis=Words(
        "With n busy processes for each core, each takes n times as long and together they keep no more cores busy "
        "than "
        "there are: nothing is gained.",
        "每个核上有 n 个繁忙进程时，各自耗时变成 n 倍，合计占用的核不会超过实际核数：没有任何收益。",
    ),
    run=run,
    causes=(
        Words(
            "other processes compete for the same cores",
            "其他进程在争用同样的核",
        ),
        Words(
            "starting together takes a while: the first ones run alone for a moment",
            "启动有先后：先启动的进程独占了一小段时间",
        ),
    ),
    code=(
        "cairn/hw/host.py:read_cpu",
        "cairn/cluster/elastic.py",
        "cairn/train/data/ordered_pool.py:available_cores",
    ),
    reading=("The Tail at Scale (2013)", "sched(7), Linux manual pages"),
    questions=(
        Question(
            Words(
                "Eight ranks on one machine, each with OMP threads for all 64 cores: what happens?",
                "一台机器 8 个 rank，每个 rank 都按 64 核开 OMP 线程，会怎样？",
            ),
            Words(
                "512 threads on 64 cores. OpenMP's barriers wait for threads that are not running, so it becomes "
                "several "
                "times slower than 8 threads each. Set OMP_NUM_THREADS = cores / ranks.",
                "64 核上有 512 个线程：OpenMP 的 barrier 会等没在运行的线程，比每个 rank 8 线程慢好几倍。应设 "
                "OMP_NUM_THREADS = 核数 / rank 数。",
            ),
        ),
        Question(
            Words("What does a load average of 32 on 8 cores tell?", "8 核机器负载 32 说明什么？"),
            Words(
                "About four runnable (or uninterruptible) tasks for each core: CPU-bound work takes four times as "
                "long. "
                "vmstat's r column and PSI (cpu.pressure) say whether it is CPU or disk.",
                "每核约有 4 个可运行（或不可中断）任务：CPU 型工作耗时约 4 倍。vmstat 的 r 列和 PSI（cpu.pressure）"
                "能区分是 CPU 还是磁盘。",
            ),
        ),
        Question(
            Words(
                "When is more workers than cores right?",
                "什么时候 worker 数应多于核数？",
            ),
            Words(
                "When they wait: for a disk, a network or a GPU. With a share w of waiting, cores / (1 - w) workers "
                "keep the "
                "cores busy.",
                "当它们在等待磁盘、网络或 GPU 时：等待占比为 w，则 核数 / (1 - w) 个 worker 才能占满核。",
            ),
        ),
    ),
    needs=("linux", "2 cores"),
    seconds=3.0,
)
