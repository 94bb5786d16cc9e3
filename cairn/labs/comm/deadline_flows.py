"""Who should send first when jobs share a link? The one whose step would be late.

    fair        everybody the same rate: all may be late together
    deadline    most urgent first, each just the rate that it needs; the rest is shared (D3, earliest deadline first)

Training jobs compute while last step's gradients travel; bytes are in time if they are there before the computation
ends. Both policies run on the same jobs and links in the simulator.
"""

from cairn.comm.simulate.deadlines import Fate, Job, run_jobs
from cairn.labs.lab import Check, Lab, Lines, Outcome, Plot, Question, Table, Words
from cairn.labs.workbench import Workbench

GB_PER_S = 50.0


def jobs_at(load: float, steps: int) -> list[Job]:
    """Three jobs on one link: tight, usual and patient; together they need `load` of it."""
    kinds = (("tight", 400.0, 0.5), ("usual", 1000.0, 0.3), ("patient", 4000.0, 0.2))
    return [
        Job(
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


LAB = Lab(
    name="deadline-flows",
    area="comm",
    title=Words("Flows with a deadline", "带截止期限的流"),
    hypothesis=Words(
        "Three jobs that together need less than the link can carry never miss a deadline when "
        "the most urgent goes first; "
        "shared fairly, the tightest one is late although there is enough bandwidth for all.",
        "三个作业合计需求小于链路容量时，按最紧急优先永不误期；若公平共享，即使总带宽足够，期限最紧的作业仍会迟到。",
    ),
    run=run,
    causes=(
        Words(
            "jobs drift: a job that was late once begins its next step later, and pressure moves on",
            "作业相位漂移：迟到一次后下一步开始得更晚，压力转移",
        ),
        Words(
            "the policy knows sizes and deadlines exactly, which a real fabric has to be told",
            "策略确切知道大小与期限，真实网络需要作业告知",
        ),
    ),
    code=(
        "cairn/comm/simulate/deadlines.py:by_deadline",
        "cairn/comm/simulate/fair.py:max_min",
    ),
    reading=(
        "Better Never than Late: Meeting Deadlines in Datacenter Networks (2011)",
        "CASSINI: Network-Aware Job Scheduling in Machine Learning Clusters (2024)",
    ),
    questions=(
        Question(
            Words(
                "When can earliest-deadline-first keep all deadlines?", "EDF 何时能满足所有期限？"
            ),
            Words(
                "On one link whenever any policy can: demand within every interval must not "
                "exceed what the link carries. On "
                "several links it is a heuristic.",
                "单链路上只要存在可行策略 EDF 就可行：任意区间内的需求不超过链路容量。多链路时只是启发式。",
            ),
        ),
        Question(
            Words(
                "Why is a training job's traffic friendly to scheduling?",
                "训练作业的流量为什么适合调度？",
            ),
            Words(
                "It is periodic and known: the same bytes every step, with the compute phase "
                "as slack. Shifting phases of "
                "two jobs can make them not meet at all.",
                "它是周期性的且可预知：每步字节相同，计算阶段就是余量；把两个作业的相位错开就可能完全不冲突。",
            ),
        ),
        Question(
            Words(
                "What does fair sharing optimise, and why is that wrong here?",
                "公平共享优化的是什么，为什么在这里不合适？",
            ),
            Words(
                "The smallest rate. A step gains nothing from bytes that come early and loses "
                "everything from those that "
                "come late, so equal rates waste bandwidth on whoever has slack.",
                "它最大化最小速率。但早到的数据对训练步没有好处、迟到才有损失，平均分配把带宽浪费在有余量的作业上。",
            ),
        ),
    ),
    seconds=2.0,
)
