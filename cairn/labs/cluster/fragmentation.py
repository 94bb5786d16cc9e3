"""A third of the GPUs is free and the next job does not fit. How much of that is the scheduler's own doing?

    free GPUs   [.7][.4][.3][.6]  =  2.0 together, and none whole: a job that needs one GPU waits

Pods that share GPUs arrive and never leave; each policy decides where. The same experiment as in the FGD paper, on a
drawn mix of pods: what is allocated when as much was asked for as there is.
"""

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
from cairn.labs.workbench import Workbench

NODES = 80


def run(bench: Workbench) -> Outcome:
    import numpy as np

    from cairn.cluster.simulate.openb import Nodes, Pods
    from cairn.cluster.simulate.packing import PUBLISHED, pack

    draw = np.random.default_rng(5)
    count = 1500
    # About as in a published production trace: half share a GPU, most others take one, a few take eight.
    kind = draw.choice(7, count, p=[0.12, 0.16, 0.16, 0.1, 0.4, 0.04, 0.02])
    milli = np.array([120, 330, 460, 810, 1000, 1000, 1000])[kind]
    whole = np.array([1, 1, 1, 1, 1, 2, 8])[kind]
    cpu = np.minimum(draw.choice([2000, 4000, 6000, 8000], count) * whole, 64_000)
    none = np.zeros(count, int)
    pods = Pods(cpu=cpu, memory=8192 * whole, count=whole, milli=milli, created=none, deleted=none)
    nodes = Nodes(
        cpu=np.full(NODES, 96_000), memory=np.full(NODES, 700_000), gpus=np.full(NODES, 8)
    )
    rows, lines, allocated = [], {}, {}
    seeds = range(bench.pick(3, 1))
    for policy in ("random", "packing", "bestfit", "fgd"):
        bench.step(f"{count} pods, {policy}")
        runs = [pack(pods, nodes, policy, seed) for seed in seeds]
        allocated[policy] = float(np.mean([one.allocated for one in runs])) * 100
        turned = float(np.mean([one.turned_away for one in runs]))
        rows.append([policy, allocated[policy], turned, PUBLISHED[policy]])
        lines[policy] = [(arrived * 100, given * 100) for arrived, given in runs[0].curve]
    gap = PUBLISHED["fgd"] - PUBLISHED["random"]
    return Outcome(
        checks=_checks(gap, allocated),
        plots=[
            Plot(
                title=Words("Allocated by what was asked for", "已分配随需求的变化"),
                x=Words("% of all GPUs asked for", "累计请求（占全部 GPU 的 %）"),
                y=Words("% allocated", "已分配 %"),
                lines=lines,
                limit=("all GPUs", 100.0),
            )
        ],
        table=Table(
            columns=[
                Words("policy", "策略"),
                Words("% allocated at 100% asked for", "请求 100% 时分配的 %"),
                Words("pods turned away", "被拒 pod 数"),
                Words("published for a production trace, %", "论文（生产 trace）%"),
            ],
            rows=rows,
        ),
    )


def _checks(gap: float, allocated: dict[str, float]) -> list[Check]:
    return [
        Check(
            what=Words(
                "percentage points that FGD allocates beyond random", "FGD 比随机多分配的百分点"
            ),
            predicted=gap,
            measured=allocated["fgd"] - allocated["random"],
            unit="points",
            kind="at_least",
            within=0.1,
        ),
        Check(
            what=Words("FGD against best fit", "FGD 与 best fit 之比"),
            predicted=1.0,
            measured=allocated["fgd"] / allocated["bestfit"],
            unit="x",
            kind="at_least",
            within=0.01,
        ),
    ]


LAB = Lab(
    name="fragmentation",
    area="cluster",
    title=Words("Fragmentation of shared GPUs", "共享 GPU 的碎片"),
    hypothesis=Words(
        "Where pods are placed decides how much of the same GPUs can be allocated: placing each where it breaks up "
        "the least for the pods that will come (FGD) gains at least the nine points over random that were "
        "published, and is no worse than best fit.",
        "pod 放在哪里决定了同样的 GPU 能分配多少：放到对未来 pod 碎片增加最少的位置（FGD），"
        "比随机至少多出论文公布的九个百分点，且不差于 best fit。",
    ),
    run=run,
    causes=(
        Words(
            "the mix of pods: with whole GPUs only there is hardly anything to break up",
            "pod 组成：若都是整卡，几乎没有碎片可言",
        ),
        Words(
            "a small cluster: one pod of eight GPUs is a large step",
            "集群小：一个 8 卡 pod 就是很大的台阶",
        ),
    ),
    code=(
        "cairn/cluster/simulate/fragmentation.py:fragmentation",
        "cairn/cluster/simulate/packing.py:pack",
        "cairn/cluster/simulate/rules.py:fgd_rule",
    ),
    reading=(
        "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent (2023)",
    ),
    questions=(
        Question(
            Words("Why is best fit not optimal here?", "为什么 best fit 不是最优？"),
            Words(
                "It fills the tightest node without asking whether what is left can still be used: 0.3 of a GPU "
                "left over is useless if pods ask for 0.46.",
                "它只找最紧的节点，不问剩下的还能不能用：若 pod 都要 0.46，剩 0.3 张卡就是废的。",
            ),
        ),
        Question(
            Words("How do you defragment a cluster that is running?", "如何整理运行中集群的碎片？"),
            Words(
                "Move what can be moved: elastic or checkpointed jobs, inference replicas (start one, drain one). "
                "Reserve whole nodes for gangs so that small pods do not spread over them.",
                "迁移可迁移的：弹性或可 checkpoint 的作业、推理副本（先起后停）。给 gang 预留整机，避免小 pod "
                "撒满所有节点。",
            ),
        ),
        Question(
            Words("Which metric shows fragmentation to an operator?", "运维用什么指标看碎片？"),
            Words(
                "Free GPUs that the next job of the usual mix could not use, and GPU hours idle while somebody "
                "waited; the mere number of free GPUs hides both.",
                "按常见作业组成，下一个作业用不上的空闲 GPU 数，以及有人等待时的空闲 GPU 小时；"
                "单看空闲数两者都看不出来。",
            ),
        ),
    ),
    seconds=5.0,
)
