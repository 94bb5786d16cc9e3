"""One rank in four computes three times as long. What does the job lose, and who finds it?

    rank 0   ###.......|          # computes, . waits in the all-reduce
    rank 1   ###.......|
    rank 2   ##########|          everybody's step is the slowest one's
    rank 3   ###.......|

Real processes with a real collective between them; the detector sees only how long each says that it computed.
"""

import math

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench

RANKS, SLOW, FACTOR = 4, 2, 3.0
WORK_S = 0.03  # above what the detector takes for noise


def timed_steps(rank: int, count: int, steps: int, slow: float) -> list[tuple[float, float]]:
    """(seconds of own work, seconds of the whole step) of every step of one rank."""
    import time

    import torch
    import torch.distributed as dist

    gradient, times = torch.ones(1024), []
    for _ in range(steps):
        began = time.perf_counter()
        time.sleep(WORK_S * (slow if rank == SLOW else 1.0))
        worked = time.perf_counter()
        dist.all_reduce(gradient)
        times.append((worked - began, time.perf_counter() - began))
    return times


def detected(steps: list[list[tuple[float, float]]]) -> dict[int, int]:
    """Rank -> step at which the trainer's detector calls it slow."""
    from cairn.train.recovery.failure_detection import RankView, Slowness
    from cairn.train.recovery.status_board import TRAINING

    watch, detected_at = Slowness(factor=2.0), {}
    for number in range(len(steps[0])):
        samples = [
            RankView(
                rank=rank, alive=True, phase=TRAINING, beat=1.0, step=number, busy_s=own[number][0]
            )
            for rank, own in enumerate(steps)
        ]
        for rank in watch.look(samples):
            detected_at.setdefault(rank, number + 1)
    return detected_at


def run(bench: Workbench) -> Outcome:
    from cairn.labs.ranks import run_ranks

    steps = bench.setting("steps", bench.pick(9, 6))
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
    middle: dict[str, list[float]], detected_at: dict[int, int], alarms: int, idle: float
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
            measured=min(detected_at, default=-1),
            unit="rank",
        ),
        Check(
            what=Words("steps until it is named, at most", "指认所需步数（最多）"),
            predicted=3,
            measured=detected_at.get(SLOW, math.inf),
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


LAB = described(__file__, run)
