"""A third of the GPUs is free and the next job does not fit. How much of that is the scheduler's own doing?

    free GPUs   [.7][.4][.3][.6]  =  2.0 together, and none whole: a job that needs one GPU waits

Pods that share GPUs arrive and never leave; each policy decides where. The same experiment as in the FGD paper, on a
drawn mix of pods: what is allocated when as much was asked for as there is.
"""

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

NODES = 80


def run(bench: Workbench) -> Outcome:
    import numpy as np

    from cairn.cluster.simulate.openb import OpenbNodes, Pods
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
    nodes = OpenbNodes(
        cpu=np.full(NODES, 96_000), memory=np.full(NODES, 700_000), gpus=np.full(NODES, 8)
    )
    rows, lines, allocated = [], {}, {}
    seeds = range(bench.setting("seeds", bench.pick(3, 1)))
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


LAB = described(__file__, run)
