"""Who should send first when jobs share a link? The one whose step would be late.

    fair        everybody the same rate: all may be late together
    deadline    most urgent first, each just the rate that it needs; the rest is shared (D3, earliest deadline first)

Training jobs compute while last step's gradients travel; bytes are in time if they are there before the computation
ends. Both policies run on the same jobs and links in the simulator.
"""

from cairn.comm.simulate.deadlines import Fate, TransferJob, run_jobs
from cairn.labs.lab import Check, Lines, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

GB_PER_S = 50.0


def jobs_at(load: float, steps: int) -> list[TransferJob]:
    """Three jobs on one link: tight, usual and patient; together they need `load` of it."""
    kinds = (("tight", 400.0, 0.5), ("usual", 1000.0, 0.3), ("patient", 4000.0, 0.2))
    return [
        TransferJob(
            name=name,
            links=(0,),
            bytes=share * load * GB_PER_S * 1e3 * compute,
            compute_us=compute,
            start_us=17.0 * place,
            steps=max(2, int(steps * 400.0 / compute)),
        )
        for place, (name, compute, share) in enumerate(kinds)
    ]


def run(bench: Workbench) -> Outcome:
    import numpy as np

    link = np.array([GB_PER_S])
    steps = bench.pick(200, 60)
    missed: dict[str, list[tuple[float, float]]] = {"fair": [], "deadline": []}
    last: dict[str, list[Fate]] = {}
    loads = (0.5, 0.7, 0.8, 0.9, 0.98)
    for load in loads:
        jobs = jobs_at(load, steps)
        for policy in missed:
            bench.step(f"{policy} at {load:.0%} load")
            fates = run_jobs(jobs, link, policy)
            share = sum(fate.missed for fate in fates) / sum(fate.steps for fate in fates)
            missed[policy].append((load, share))
            last[policy] = fates
    slower = max(
        mine.mean_step_us / theirs.mean_step_us
        for mine, theirs in zip(last["deadline"], last["fair"], strict=True)
    )
    return Outcome(
        checks=_checks(missed, slower),
        plots=[
            Plot(
                title=Words("Steps whose bytes came late", "数据迟到的步占比"),
                x=Words("load of the link", "链路负载"),
                y=Words("share of steps", "步的比例"),
                lines=missed,
            )
        ],
        table=Table(
            columns=[
                Words("job", "作业"),
                Words("policy", "策略"),
                Words("steps", "步数"),
                Words("late", "迟到"),
                Words("mean step us", "平均步长 us"),
                Words("alone us", "独占时 us"),
            ],
            rows=[
                [fate.name, policy, fate.steps, fate.missed, fate.mean_step_us, fate.ideal_step_us]
                for policy, fates in last.items()
                for fate in fates
            ],
        ),
    )


def _checks(missed: Lines, slower: float) -> list[Check]:
    return [
        Check(
            what=Words("deadlines missed by urgency, any load", "按紧急程度调度错过的截止期限"),
            predicted=0.0,
            measured=max(share for _, share in missed["deadline"]),
            unit="share",
            kind="at_most",
            within=0.0,
        ),
        Check(
            what=Words(
                "deadlines missed by fair sharing at 98%", "公平共享在 98% 负载下错过的比例"
            ),
            predicted=0.05,
            measured=missed["fair"][-1][1],
            unit="share",
            kind="at_least",
        ),
        Check(
            what=Words(
                "slowest job, deadline over fair", "最受影响作业的步长：deadline 与 fair 之比"
            ),
            predicted=1.0,
            measured=slower,
            unit="x",
            kind="at_most",
            within=0.05,
        ),
    ]


LAB = described(__file__, run)
