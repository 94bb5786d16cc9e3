"""The first in line does not fit yet. May smaller jobs pass it?

    FIFO    AAAAAAAA            A runs, B (8 GPUs) waits for all of A, C (2 GPUs, short) waits behind B
    EASY    AAAAAAAA            B is promised the moment when A ends; C ends before that, so it may pass
            CC

A trace small enough to predict by hand to the second, then a drawn one with a thousand jobs.
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Rows, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.cluster.simulate.summary import ReplaySummary


def run(bench: Workbench) -> Outcome:
    from cairn.cluster.simulate.jobs import SimulatedCluster, SimulatedJob
    from cairn.cluster.simulate.policies import POLICIES
    from cairn.cluster.simulate.replay import replay
    from cairn.cluster.simulate.summary import summarise
    from cairn.cluster.simulate.traces import made_to_measure, synthetic

    small = [
        SimulatedJob(id=0, submit=0.0, duration=100.0, limit=100.0, gpus=6),  # A
        SimulatedJob(id=1, submit=1.0, duration=50.0, limit=50.0, gpus=8),  # B: waits for A
        SimulatedJob(
            id=2, submit=2.0, duration=90.0, limit=90.0, gpus=2
        ),  # C: ends at 92, before B's turn
        SimulatedJob(id=3, submit=3.0, duration=200.0, limit=200.0, gpus=2),  # D: would hold up B
    ]
    starts = {}
    for name in ("fifo", "easy"):
        stories = replay(SimulatedCluster(nodes=1, gpus=8), small, POLICIES[name]).stories
        starts[name] = [stories[number].first_start or 0.0 for number in range(4)]
    jobs = synthetic(bench.setting("jobs", bench.pick(1500, 800)), seed=3).jobs
    cluster, _ = made_to_measure(jobs, gpus=8, rack=4, load=1.2)
    rows, lines, summaries = [], {}, {}
    for name in ("fifo", "sjf", "easy"):
        bench.step(f"{len(jobs)} jobs, {name}")
        history = replay(cluster, jobs, POLICIES[name])
        summaries[name] = one = summarise(history)
        rows.append(
            [
                name,
                one.wait_mean / 3600,
                one.wait_p99 / 3600,
                one.utilisation,
                one.stranded_gpu_hours,
            ]
        )
        step = max(1, len(history.samples) // 200)
        lines[name] = [
            (sample.at / 3600, float(sample.waiting)) for sample in history.samples[::step]
        ]
    return Outcome(
        checks=_checks(starts, summaries),
        plots=[
            Plot(
                title=Words("Jobs in line", "排队作业数"),
                x=Words("hours", "小时"),
                y=Words("waiting", "等待数"),
                lines=lines,
            )
        ],
        table=_table(rows),
    )


def _checks(starts: dict[str, list[float]], summaries: dict[str, "ReplaySummary"]) -> list[Check]:
    return [
        Check(
            what=Words("start of C with FIFO", "FIFO 下 C 的启动时刻"),
            predicted=150.0,
            measured=starts["fifo"][2],
            unit="s",
        ),
        Check(
            what=Words("start of C with backfill", "backfill 下 C 的启动时刻"),
            predicted=2.0,
            measured=starts["easy"][2],
            unit="s",
        ),
        Check(
            what=Words(
                "start of B with backfill: not delayed", "backfill 下 B 的启动时刻：没有推迟"
            ),
            predicted=100.0,
            measured=starts["easy"][1],
            unit="s",
        ),
        Check(
            what=Words(
                "mean wait of the drawn trace, FIFO over backfill",
                "抽样 trace 的平均等待：FIFO / backfill",
            ),
            predicted=1.5,
            measured=summaries["fifo"].wait_mean / max(summaries["easy"].wait_mean, 1e-9),
            unit="x",
            kind="at_least",
        ),
    ]


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("policy", "策略"),
            Words("mean wait, h", "平均等待（小时）"),
            Words("p99 wait, h", "p99 等待（小时）"),
            Words("utilisation", "利用率"),
            Words("GPU hours idle while a job waited", "有人等待时的空闲 GPU 小时"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
