"""A worker leaves, another comes back. Does the training notice?

    4 workers   batch 12 = 3 + 3 + 3 + 3          each sums its samples' gradients, all are added up
    3 workers   batch 12 = 4 + 4 + 4              the same sum, in another order
    2 workers   batch 12 = 6 + 6

As long as the batch of a step stays the same, so does the gradient. For the cluster elasticity is worth something, too:
jobs that can shrink let others start, and take what is free when no job waits.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Points, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor

    from cairn.cluster.simulate.summary import ReplaySummary

BATCH, SIZE, STEPS = 12, 32, 30
Workers = Callable[[int], int]  # how many there are in a step
POLICIES = ("easy", "elastic")
PLANS: dict[str, Workers] = {
    "4 workers": lambda step: 4,
    "4, then 3, then 2": lambda step: 4 - min(2, step // 10),
    "1 worker": lambda step: 1,
}


class Traced(NamedTuple):
    """A trace that was lived through under one policy."""

    summary: "ReplaySummary"
    busy: Points  # GPUs at work by hour
    gpus: int  # that there are


def train(workers_at: Workers) -> "Tensor":
    """Weights after all steps; sample i of a step goes to worker i % workers, and sums are added worker by worker."""
    import torch

    weight = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        x_BD = torch.randn(BATCH, SIZE, generator=draw, dtype=torch.float64)
        y_BD = x_BD.flip(1)
        workers = workers_at(step)
        total = torch.zeros_like(weight)
        for worker in range(workers):
            own = slice(worker, None, workers)
            total += x_BD[own].t() @ (x_BD[own] @ weight - y_BD[own])
        weight -= 0.1 * total / BATCH
    return weight


def run(bench: Workbench) -> Outcome:
    from cairn.train.parallel.layout import Layout
    from cairn.train.recovery.templates import shrunk

    bench.step("the same batches with 4, 3 and 2 workers")
    weights_of = {name: train(plan) for name, plan in PLANS.items()}
    apart = max(
        float((weight - weights_of["4 workers"]).abs().max()) for weight in weights_of.values()
    )
    smaller = shrunk(Layout(dp=4), 3, lambda one: BATCH % one.dp == 0)
    bench.step("one elastic job and a newcomer")
    starts = {name: newcomer_starts(name) for name in POLICIES}
    traced = {name: drawn_trace(bench, name) for name in POLICIES}
    waits = {name: one.summary.wait_mean for name, one in traced.items()}
    return Outcome(
        checks=_checks(apart, smaller.dp if smaller else 0, starts["elastic"], waits),
        plots=[_plot(traced)],
        table=_table(traced),
        notes=[
            Words(
                f"Without elasticity the newcomer of the small example starts at {starts['easy']:.0f} s, when the "
                "other ends.",
                f"没有弹性时，小例子里的新作业要到 {starts['easy']:.0f} 秒（前一个结束）才启动。",
            )
        ],
    )


def newcomer_starts(policy: str) -> float:
    """When a job of 4 GPUs begins that comes to 8 which another has, and may have as few as 2 of."""
    from cairn.cluster.simulate.jobs import SimulatedCluster, SimulatedJob
    from cairn.cluster.simulate.policies import POLICIES as KNOWN
    from cairn.cluster.simulate.replay import ReplaySettings, replay

    pair = [
        SimulatedJob(id=0, submit=0.0, duration=7200.0, limit=20_000.0, gpus=8, least=2),
        SimulatedJob(id=1, submit=600.0, duration=600.0, limit=600.0, gpus=4),
    ]
    history = replay(
        SimulatedCluster(nodes=1, gpus=8), pair, KNOWN[policy], ReplaySettings(restart=0.0)
    )
    return history.stories[1].first_start or 0.0


def drawn_trace(bench: Workbench, policy: str) -> Traced:
    """A drawn trace whose larger jobs could do with a quarter of their GPUs, on a cluster that is too small."""
    import msgspec

    from cairn.cluster.simulate.policies import POLICIES as KNOWN
    from cairn.cluster.simulate.replay import replay
    from cairn.cluster.simulate.summary import summarise
    from cairn.cluster.simulate.traces import made_to_measure, synthetic

    jobs = synthetic(bench.setting("jobs", bench.pick(1200, 500)), seed=6).jobs
    jobs = [
        msgspec.structs.replace(job, least=job.gpus // 4 if job.gpus >= 4 else 0) for job in jobs
    ]
    cluster, _ = made_to_measure(jobs, gpus=8, rack=4, load=1.6)
    bench.step(f"{len(jobs)} jobs, {policy}")
    history = replay(cluster, jobs, KNOWN[policy])
    step = max(1, len(history.samples) // 200)
    busy = [(sample.at / 3600, float(sample.busy)) for sample in history.samples[::step]]
    return Traced(summarise(history), busy, cluster.total)


def _checks(apart: float, replicas: int, start: float, waits: dict[str, float]) -> list[Check]:
    return [
        Check(
            what=Words("largest difference of a weight after 30 steps", "30 步后权重的最大差异"),
            predicted=1e-10,
            measured=apart,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words(
                "replicas after one of four is lost (12 samples a step)",
                "四个副本丢一个后的副本数（每步 12 个样本）",
            ),
            predicted=3,
            measured=replicas,
            unit="replicas",
        ),
        Check(
            what=Words(
                "start of the newcomer with an elastic neighbour", "有弹性邻居时新作业的启动时刻"
            ),
            predicted=600.0,
            measured=start,
            unit="s",
        ),
        Check(
            what=Words(
                "mean wait of the drawn trace, elastic over not",
                "抽样 trace 的平均等待：弹性 / 非弹性",
            ),
            predicted=0.5,
            measured=waits["elastic"] / max(waits["easy"], 1e-9),
            unit="x",
            kind="at_most",
        ),
    ]


def _plot(traced: dict[str, Traced]) -> Plot:
    return Plot(
        title=Words("GPUs at work", "在用 GPU 数"),
        x=Words("hours", "小时"),
        y=Words("GPUs", "GPU"),
        lines={name: one.busy for name, one in traced.items()},
        limit=("all GPUs", float(traced["elastic"].gpus)),
    )


def _table(traced: dict[str, Traced]) -> Table:
    return Table(
        columns=[
            Words("policy", "策略"),
            Words("mean wait, h", "平均等待（小时）"),
            Words("mean completion, h", "平均完成（小时）"),
            Words("utilisation", "利用率"),
            Words("changes of size", "伸缩次数"),
        ],
        rows=[
            [name, s.wait_mean / 3600, s.jct_mean / 3600, s.utilisation, s.resized]
            for name, (s, _, _) in traced.items()
        ],
    )


LAB = described(__file__, run)
