"""The first in line does not fit yet. May smaller jobs pass it?

    FIFO    AAAAAAAA            A runs, B (8 GPUs) waits for all of A, C (2 GPUs, short) waits behind B
    EASY    AAAAAAAA            B is promised the moment when A ends; C ends before that, so it may pass
            CC

A trace small enough to predict by hand to the second, then a drawn one with a thousand jobs.
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Rows, Table, Words
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.cluster.simulate.summary import Summary


def run(bench: Workbench) -> Outcome:
    from cairn.cluster.simulate.jobs import Cluster, Job
    from cairn.cluster.simulate.policies import POLICIES
    from cairn.cluster.simulate.replay import replay
    from cairn.cluster.simulate.summary import summarise
    from cairn.cluster.simulate.traces import made_to_measure, synthetic

    small = [
        Job(id=0, submit=0.0, duration=100.0, limit=100.0, gpus=6),  # A
        Job(id=1, submit=1.0, duration=50.0, limit=50.0, gpus=8),  # B: waits for A
        Job(id=2, submit=2.0, duration=90.0, limit=90.0, gpus=2),  # C: ends at 92, before B's turn
        Job(id=3, submit=3.0, duration=200.0, limit=200.0, gpus=2),  # D: would hold up B
    ]
    starts = {}
    for name in ("fifo", "easy"):
        stories = replay(Cluster(nodes=1, gpus=8), small, POLICIES[name]).stories
        starts[name] = [stories[number].first_start or 0.0 for number in range(4)]
    jobs = synthetic(bench.pick(1500, 800), seed=3).jobs
    cluster, _ = made_to_measure(jobs, gpus=8, rack=4, load=1.2)
    rows, lines, found = [], {}, {}
    for name in ("fifo", "sjf", "easy"):
        bench.step(f"{len(jobs)} jobs, {name}")
        history = replay(cluster, jobs, POLICIES[name])
        found[name] = one = summarise(history)
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
        checks=_checks(starts, found),
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


def _checks(starts: dict[str, list[float]], found: dict[str, "Summary"]) -> list[Check]:
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
            measured=found["fifo"].wait_mean / max(found["easy"].wait_mean, 1e-9),
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
            Words("GPU hours idle while somebody waited", "有人等待时的空闲 GPU 小时"),
        ],
        rows=rows,
    )


LAB = Lab(
    name="backfill",
    area="cluster",
    title=Words("Backfill: passing without delaying", "backfill：插队但不耽误"),
    hypothesis=Words(
        "A job may pass the first in line if it ends before the first can start; then the first is not delayed by a "
        "second, and a trace of large and small jobs waits at least a third less than with FIFO.",
        "若作业能在队首启动前结束，就可以插队，队首一秒也不推迟；大小混合的 trace 平均等待比 FIFO 至少少三分之一。",
    ),
    run=run,
    causes=(
        Words("nobody waits: the cluster is too large for this trace", "集群太大，没人排队"),
        Words(
            "limits far above durations: holes look too short for anybody",
            "时限远大于实际时长，空隙看起来谁也放不下",
        ),
    ),
    code=(
        "cairn/cluster/simulate/policies.py:decide_easy",
        "cairn/cluster/simulate/reservation.py:reserve",
        "cairn/cluster/simulate/replay.py:replay",
    ),
    reading=(
        "The ANL/IBM SP Scheduling System (1995)",
        "Utilization, Predictability, Workloads, and User Runtime Estimates in Scheduling the IBM SP2 with "
        "Backfilling (2001)",
    ),
    questions=(
        Question(
            Words(
                "What does backfill need from users, and how does it fail?",
                "backfill 需要用户提供什么，会怎样失效？",
            ),
            Words(
                "A time limit. People overestimate by two to five times, so the reservation is too late and holes "
                "are missed; a limit that is too short ends the job.",
                "需要时限。用户常高估 2 到 5 倍，预留就过晚、空隙被浪费；时限过短则作业被杀。",
            ),
        ),
        Question(
            Words("EASY or conservative backfill?", "EASY 与 conservative backfill 有何区别？"),
            Words(
                "EASY promises a start to the first in line only; conservative to everybody, which bounds all waits "
                "but finds fewer holes. Slurm's backfill is nearer to the second, with a window.",
                "EASY 只给队首承诺；conservative 给所有人承诺，等待有界但空隙更少。Slurm 的 backfill 更接近后者，"
                "带窗口。",
            ),
        ),
        Question(
            Words("Why is the shortest job first not enough?", "为什么不能只用最短作业优先？"),
            Words(
                "Large long jobs starve while shorter ones keep coming; backfill keeps the order of the line and "
                "uses only what it leaves over.",
                "不断有短作业到来时，大而长的作业会饿死；backfill 保持队列顺序，只用剩余的空隙。",
            ),
        ),
    ),
    seconds=3.0,
)
