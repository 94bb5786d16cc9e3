"""At which size does a library change its algorithm, and can that be predicted? From a sweep with holes in it.

    small    latency decides     LL, tree        large    bandwidth decides     ring, NVLS, Simple

NCCL's own cost model with three constants is fitted to every second size of published sweeps and must predict the sizes
it has not seen, and the size at which the algorithm changes. Then this project's own backend chooses, and is measured.
"""

import math
from statistics import median

from cairn.comm.cost import Link
from cairn.comm.nccl_model import calibrate, choose, cluster_of
from cairn.comm.published import ALL_REDUCE, SWITCHES, Sweep, Switch
from cairn.labs.comm._timed import slowest_us, times_us
from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

RANKS = 4
TRIED = ("one_shot", "two_shot", "ring")


def forced(rank: int, count: int, sizes: tuple[int, ...], repeats: int) -> list[list[list[float]]]:
    """Microseconds by schedule, by size, of every repeat."""
    import torch
    import torch.distributed as dist

    from cairn.comm.backend import Options

    groups = [dist.new_group(backend="cairn", pg_options=Options(schedule=name)) for name in TRIED]
    vectors = [torch.ones(size // 4) for size in sizes]
    return [
        [times_us(lambda g=g, v=v: dist.all_reduce(v, group=g), repeats) for v in vectors]
        for g in groups
    ]


def held_out(sweep: Sweep) -> tuple[float, list[tuple[int, float, float, str]]]:
    """Median error of the sizes that the calibration has not seen, and all rows."""
    cluster = cluster_of(sweep.fabric, sweep.gpus, sweep.nodes, sweep.nic_gb_per_s)
    constants, _ = calibrate(cluster, sweep.points[::2])
    rows, errors = [], []
    for place, point in enumerate(sweep.points):
        guess = choose(cluster, "all_reduce", point.bytes, constants)
        rows.append((point.bytes, point.us, guess.us, f"{guess.algorithm}/{guess.protocol}"))
        if place % 2:
            errors.append(abs(guess.us / point.us - 1))
    return median(errors), rows


def run(bench: Workbench) -> Outcome:
    from cairn.comm.backend.choice import Places, ranked

    name = "8 x H200"
    sweep = next(one for one in ALL_REDUCE if one.name == name)
    bench.step(f"{name}: fit on half of the sizes")
    error, rows = held_out(sweep)
    told = next(one for one in SWITCHES if one.sweep == name)
    found = next(size for size, _, _, what in rows if what.startswith(told.after))
    sizes = bench.pick((4 << 10, 64 << 10, 1 << 20, 4 << 20), (4 << 10, 1 << 20))
    bench.step(f"this project's backend on {RANKS} ranks: each schedule forced")
    times = run_ranks(RANKS, forced, sizes, bench.pick(15, 6), backend="gloo")
    best = [
        [min(slowest_us([rank[which][at] for rank in times])) for at in range(len(sizes))]
        for which in range(len(TRIED))
    ]
    regrets = []
    for at, size in enumerate(sizes):
        order = [
            row.name
            for row in ranked(
                "all_reduce", Places((0,) * RANKS), size, Link(alpha_us=60, gb_per_s=1)
            )
        ]
        chosen = next(one for one in order if one in TRIED)
        regrets.append(best[TRIED.index(chosen)][at] / min(best[w][at] for w in range(len(TRIED))))
    return Outcome(
        checks=_checks(error, told, found, regrets),
        plots=[_plot(name, rows)],
        table=Table(
            columns=[
                Words("bytes", "字节"),
                Words("published us", "公布值 us"),
                Words("model us", "模型 us"),
                Words("model's choice", "模型的选择"),
            ],
            rows=[list(row) for row in rows],
        ),
        notes=[
            Words(
                f"{size >> 10} KiB on {RANKS} ranks here: "
                + ", ".join(f"{one} {best[w][at]:.0f} us" for w, one in enumerate(TRIED)),
                f"本机 {RANKS} 个 rank，{size >> 10} KiB："
                + "，".join(f"{one} {best[w][at]:.0f} us" for w, one in enumerate(TRIED)),
            )
            for at, size in enumerate(sizes)
        ],
    )


def _checks(error: float, told: Switch, found: int, regrets: list[float]) -> list[Check]:
    return [
        Check(
            what=Words("median error of sizes not seen", "未见过尺寸的误差中位数"),
            predicted=0.12,
            measured=error,
            unit="share",
            kind="at_most",
        ),
        Check(
            # Sizes double from row to row: the next one is as near as can be asked for.
            what=Words(
                f"where {told.before} becomes {told.after}: off the published {told.bytes >> 20} MiB by",
                f"{told.before} 切换到 {told.after} 的尺寸：与公布的 {told.bytes >> 20} MiB 相差",
            ),
            predicted=1,
            measured=abs(math.log2(found / told.bytes)),
            unit="doublings",
            kind="at_most",
        ),
        Check(
            what=Words("our choice over the best one, median", "本后端所选与最优之比（中位数）"),
            predicted=1.0,
            measured=median(regrets),
            unit="x",
            kind="at_most",
            within=0.4,
        ),
    ]


def _plot(name: str, rows: list[tuple[int, float, float, str]]) -> Plot:
    return Plot(
        title=Words(f"All-reduce on {name}", f"{name} 上的 all-reduce"),
        x=Words("bytes", "字节"),
        y=Words("us", "微秒"),
        lines={
            "published": [(float(size), us) for size, us, _, _ in rows],
            "model": [(float(size), us) for size, _, us, _ in rows],
        },
        log_x=True,
        log_y=True,
    )


LAB = Lab(
    name="algorithm-switch",
    area="comm",
    title=Words("Where a library changes its mind", "通信库在哪里切换算法"),
    hypothesis=Words(
        "NCCL's cost model with three constants, fitted to half of a public H200 sweep, "
        "predicts the other half within 12% "
        "and the size at which ring/LL gives way to NVLS; and this backend's choice is near the best of what it has.",
        "用公开 H200 数据的一半拟合三个常数后，NCCL 代价模型对另一半的误差在 12% 以内，并能预"
        "测 ring/LL 让位于 NVLS 的尺寸；"
        "本后端的选择接近它所拥有算法中的最优。",
    ),
    run=run,
    causes=(
        Words(
            "four ranks on few cores: which schedule is fastest depends on who is scheduled when",
            "四个 rank 挤在少数核上：哪种算法最快取决于调度时机",
        ),
        Words(
            "the constants stand for a fabric; another driver or NCCL version has others",
            "常数对应某一套硬件环境；驱动或 NCCL 版本不同则常数不同",
        ),
    ),
    code=(
        "cairn/comm/nccl_model.py:choose",
        "cairn/comm/backend/choice.py:choose",
        "cairn/comm/nccl_tuner.py:render",
    ),
    reading=(
        "Demystifying NCCL: An In-depth Analysis of GPU Communication Protocols and Algorithms (2025)",
        "NCCL documentation: NCCL_ALGO and NCCL_PROTO (2024)",
    ),
    questions=(
        Question(
            Words("What are LL, LL128 and Simple?", "LL、LL128 和 Simple 分别是什么？"),
            Words(
                "Ways to know that data has arrived: LL sends a 4-byte flag with every 4 bytes (50% of the bandwidth, "
                "lowest latency), LL128 8 of 128 bytes (needs NVLink's ordering), Simple uses "
                "fences and full bandwidth.",
                "都是判断数据到达的方式：LL 每 4 字节带 4 字节标志（带宽 50%，延迟最低），"
                "LL128 每 128 字节占 8 字节（依赖 NVLink "
                "的写顺序），Simple 用内存栅栏同步，带宽最满。",
            ),
        ),
        Question(
            Words(
                "An all-reduce of 2 MiB is slower than one of 4 MiB. What do you suspect?",
                "2 MiB 的 all-reduce 比 4 MiB 还慢，你怀疑什么？",
            ),
            Words(
                "A switch of algorithm or protocol at the wrong size: sweep with NCCL_ALGO and NCCL_PROTO forced and "
                "compare, then set a tuner file instead of environment variables.",
                "算法或协议在错误的尺寸处切换：强制 NCCL_ALGO、NCCL_PROTO 分别扫描对比，再用 "
                "tuner 文件修正，而不是用环境变量。",
            ),
        ),
        Question(
            Words(
                "Why must every rank come to the same choice?", "为什么所有 rank 必须做出相同选择？"
            ),
            Words(
                "They send each other what the schedule says: two schedules in one collective "
                "would wait for messages that "
                "nobody sends. So only facts that all share (size, hosts, settings) may enter.",
                "各 rank 按同一个调度互发消息；若选择不同，就会等待没人发送的消息。因此只能依据"
                "共享的事实（尺寸、主机、配置）来选。",
            ),
        ),
    ),
    needs=("2 processes",),
    seconds=5.0,
)
