"""One rank in four computes three times as long. What does the job lose, and who finds it?

    rank 0   ###.......|          # computes, . waits in the all-reduce
    rank 1   ###.......|
    rank 2   ##########|          everybody's step is the slowest one's
    rank 3   ###.......|

Real processes with a real collective between them; the detector sees only how long each says that it computed.
"""

import math

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.workbench import Workbench

RANKS, SLOW, FACTOR = 4, 2, 3.0
WORK_S = 0.03  # above what the detector takes for noise


def timed_steps(rank: int, count: int, steps: int, slow: float) -> list[tuple[float, float]]:
    """(seconds of own work, seconds of the whole step) of every step of one rank."""
    import time

    import torch
    import torch.distributed as dist

    gradient, found = torch.ones(1024), []
    for _ in range(steps):
        began = time.perf_counter()
        time.sleep(WORK_S * (slow if rank == SLOW else 1.0))
        worked = time.perf_counter()
        dist.all_reduce(gradient)
        found.append((worked - began, time.perf_counter() - began))
    return found


def detected(steps: list[list[tuple[float, float]]]) -> dict[int, int]:
    """Rank -> step at which the trainer's detector calls it slow."""
    from cairn.train.recovery.board import TRAINING
    from cairn.train.recovery.detect import Seen, Slowness

    watch, found = Slowness(factor=2.0), {}
    for number in range(len(steps[0])):
        seen = [
            Seen(
                rank=rank, alive=True, phase=TRAINING, beat=1.0, step=number, busy_s=own[number][0]
            )
            for rank, own in enumerate(steps)
        ]
        for rank in watch.look(seen):
            found.setdefault(rank, number + 1)
    return found


def run(bench: Workbench) -> Outcome:
    from cairn.labs.ranks import run_ranks

    steps = bench.pick(12, 6)
    bench.step(f"{RANKS} ranks, all alike")
    even = run_ranks(RANKS, timed_steps, steps, 1.0, timeout_s=60.0)
    bench.step(f"rank {SLOW} takes {FACTOR} times as long")
    uneven = run_ranks(RANKS, timed_steps, steps, FACTOR, timeout_s=60.0)
    middle = {
        name: [sorted(whole for _, whole in own)[steps // 2] for own in runs]
        for name, runs in (("alike", even), ("one slow", uneven))
    }
    rows = []
    for rank in range(RANKS):
        own = sorted(work for work, _ in uneven[rank])[steps // 2]
        rows.append(
            [rank, own * 1e3, middle["one slow"][rank] * 1e3, 1 - own / middle["one slow"][rank]]
        )
    found, alarms = detected(uneven), detected(even)
    idle = sum(row[3] for row in rows) / RANKS
    return Outcome(
        checks=_checks(middle, found, len(alarms), idle),
        table=Table(
            columns=[
                Words("rank", "rank"),
                Words("own work, ms", "自身计算（毫秒）"),
                Words("step, ms", "单步（毫秒）"),
                Words("share waiting", "等待占比"),
            ],
            rows=rows,
        ),
    )


def _checks(
    middle: dict[str, list[float]], found: dict[int, int], alarms: int, idle: float
) -> list[Check]:
    return [
        Check(
            what=Words("time of a step, one slow over all alike", "单步时间：一个慢 / 全部正常"),
            predicted=FACTOR,
            measured=max(middle["one slow"]) / max(middle["alike"]),
            unit="x",
            within=0.3,
        ),
        Check(
            what=Words("rank that the detector names", "检测器指认的 rank"),
            predicted=SLOW,
            measured=min(found, default=-1),
            unit="rank",
        ),
        Check(
            what=Words("steps until it is named, at most", "指认所需步数（最多）"),
            predicted=3,
            measured=found.get(SLOW, math.inf),
            unit="steps",
            kind="at_most",
            within=0.4,
        ),
        Check(
            what=Words("ranks that it names where all are alike", "全部正常时被误报的 rank 数"),
            predicted=0,
            measured=alarms,
            unit="ranks",
        ),
        Check(
            what=Words("share of all time spent waiting for it", "等待它的时间占比"),
            predicted=(RANKS - 1) / RANKS * (1 - 1 / FACTOR),
            measured=idle,
            unit="share",
            within=0.4,
        ),
    ]


LAB = Lab(
    name="slow-rank",
    area="cluster",
    title=Words("The slow rank", "慢 rank"),
    hypothesis=Words(
        "A synchronous job runs at the pace of its slowest rank: one of four at three times makes every step three "
        "times as long and wastes 50% of all GPU time; comparing each rank's own work with the median names it "
        "after three steps.",
        "同步作业按最慢的 rank 走：四个中一个慢三倍，每步都慢三倍，浪费 50% 的 GPU 时间；把各 rank "
        "的自身计算与中位数比较，三步即可指认。",
    ),
    run=run,
    causes=(
        Words(
            "the machine is oversubscribed: sleeping ranks wake late, all of them",
            "机器过载：所有 rank 唤醒都变慢",
        ),
        Words(
            "the collective itself takes a visible part of the step",
            "集合通信本身占了一步的可观部分",
        ),
    ),
    code=(
        "cairn/train/recovery/detect.py:Slowness",
        "cairn/train/recovery/detect.py:is_slow",
        "cairn/labs/ranks.py:run_ranks",
    ),
    reading=(
        "MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs (2024)",
        "The Tail at Scale (2013)",
    ),
    questions=(
        Question(
            Words(
                "Why compare own work and not the time of a step?",
                "为什么比较自身计算时间而不是单步时间？",
            ),
            Words(
                "All steps take equally long: everybody waits in the collective for the slow one. Only the time "
                "before the collective differs, and in the collective the slow one waits least.",
                "所有 rank 的单步时间一样长，因为都在集合通信里等慢的那个。只有进入通信之前的时间不同；"
                "慢的那个在通信里等得最少。",
            ),
        ),
        Question(
            Words("What makes a GPU slow without failing?", "GPU 为什么会变慢但不报错？"),
            Words(
                "Thermal or power throttling, a PCIe link at lower width, ECC retries, a busy host or another "
                "process, a failing NIC that retransmits. Check clocks, link width and pairwise bandwidth.",
                "过热或功耗降频、PCIe 降速降宽、ECC 重试、主机繁忙或有别的进程、网卡重传。查频率、"
                "链路宽度和两两带宽。",
            ),
        ),
        Question(
            Words("Replace a straggler or keep it?", "换掉慢节点还是留着？"),
            Words(
                "A restart costs minutes once; a 10% straggler on 1,000 GPUs costs 100 GPUs as long as it stays. "
                "Persistent: cordon at the next checkpoint. Passing: leave it.",
                "重启一次花几分钟；1000 卡里一个慢 10% 的节点等于一直浪费 100 张卡。持续的：下个 checkpoint 时隔离；"
                "偶发的：不管。",
            ),
        ),
    ),
    needs=("2 processes",),
    seconds=6.0,
)
