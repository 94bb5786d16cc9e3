"""A gang of 64 GPUs is spread over four racks instead of one. What does that cost it, and who can prevent it?

    rack switch  ----+----  ----+----          within a rack: full speed; between racks: shared uplinks
      nodes      n n n n    n n n n

The scheduler's `topology` policy keeps gangs in few racks; what spreading costs a training step comes from the
comm model.
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.cluster.simulate.summary import Summary

SLOWDOWN = 0.25  # a spread gang takes this much longer, in the replay


def run(bench: Workbench) -> Outcome:
    import msgspec

    from cairn.cluster.simulate.policies import POLICIES
    from cairn.cluster.simulate.replay import Settings, replay
    from cairn.cluster.simulate.summary import summarise
    from cairn.cluster.simulate.traces import made_to_measure, synthetic
    from cairn.plan.device import device
    from cairn.plan.train_cost import collective

    jobs = synthetic(bench.pick(1200, 400), seed=8).jobs
    jobs = [msgspec.structs.replace(job, gpus=min(job.gpus, 32), least=0) for job in jobs]
    cluster, _ = made_to_measure(jobs, gpus=8, rack=4, load=0.7)
    rows, found = [], {}
    for name in ("easy", "topology"):
        bench.step(f"{len(jobs)} jobs, {name}")
        found[name] = one = summarise(
            replay(cluster, jobs, POLICIES[name], Settings(spread_slowdown=SLOWDOWN))
        )
        rows.append([name, one.spread_gangs, one.jct_mean / 3600, one.utilisation])
    h200 = device("h200")
    slow = msgspec.structs.replace(
        h200, nic_gb_per_s=h200.nic_gb_per_s / 4
    )  # uplinks shared by four
    size = 2 * 8_000_000_000 // 8  # gradients of an 8B model in bf16, sharded over a node
    times = {
        name: collective("all_reduce", 64, size, one)
        for name, one in (("near", h200), ("far", slow))
    }
    return Outcome(
        checks=_checks(found, times),
        table=Table(
            columns=[
                Words("policy", "策略"),
                Words("gangs spread", "跨机架 gang 比例"),
                Words("mean completion, h", "平均完成时间（小时）"),
                Words("utilisation", "利用率"),
            ],
            rows=rows,
        ),
        notes=[
            Words(
                f"An all-reduce of {size / 1e9:.0f} GB over 64 GPUs takes {times['near'] * 1e3:.0f} ms at 50 GB/s a "
                f"GPU and {times['far'] * 1e3:.0f} ms where four share an uplink.",
                f"64 卡 all-reduce {size / 1e9:.0f} GB：每卡 50 GB/s 时 {times['near'] * 1e3:.0f} 毫秒，"
                f"四卡共享上行时 {times['far'] * 1e3:.0f} 毫秒。",
            )
        ],
    )


def _checks(found: dict[str, "Summary"], times: dict[str, float]) -> list[Check]:
    return [
        Check(
            what=Words(
                "share of gangs over more racks than needed, topology",
                "拓扑策略下跨多余机架的 gang 比例",
            ),
            predicted=0.05,
            measured=found["topology"].spread_gangs,
            unit="share",
            kind="at_most",
        ),
        Check(
            what=Words(
                "share of gangs over more racks than needed, without",
                "无拓扑感知时跨多余机架的 gang 比例",
            ),
            predicted=0.25,
            measured=found["easy"].spread_gangs,
            unit="share",
            kind="at_least",
        ),
        Check(
            what=Words(
                "all-reduce over uplinks with a quarter of the bandwidth",
                "上行带宽为四分之一时的 all-reduce",
            ),
            predicted=4.0,
            measured=times["far"] / times["near"],
            unit="x",
            within=0.05,
        ),
    ]


LAB = Lab(
    name="topology",
    area="cluster",
    title=Words("Placement and topology", "放置与拓扑"),
    hypothesis=Words(
        "A scheduler that does not look spreads gangs over more racks than they need; one that does almost never "
        "has to. Behind uplinks with a quarter of the bandwidth a large all-reduce takes four times as long.",
        "不看拓扑的调度器会把 gang 撒到多余的机架；看拓扑的几乎不会。上行带宽只有四分之一时，大 all-reduce 慢四倍。",
    ),
    run=run,
    causes=(
        Words(
            "an almost empty cluster spreads nobody, a full one everybody",
            "集群很空时谁都不跨，很满时谁都跨",
        ),
        Words(
            "latency, not bandwidth, decides small collectives", "小的集合通信由延迟而非带宽决定"
        ),
    ),
    code=(
        "cairn/cluster/simulate/free.py:Free",
        "cairn/cluster/simulate/policies.py:Policy",
        "cairn/plan/train_cost.py:collective",
    ),
    reading=(
        "Themis: Fair and Efficient GPU Cluster Scheduling (2020)",
        "RDMA over Ethernet for Distributed AI Training at Meta Scale (2024)",
    ),
    questions=(
        Question(
            Words("Which parallelism goes where in the topology?", "各种并行应放在拓扑的哪一层？"),
            Words(
                "Tensor parallel inside NVLink, pipeline and context across neighbouring nodes, data parallel "
                "outermost: it sends once per step and overlaps with the backward pass.",
                "张量并行放在 NVLink 内，流水线和上下文并行放相邻节点，数据并行放最外层：每步一次、可与反向重叠。",
            ),
        ),
        Question(
            Words("How does a scheduler learn the topology?", "调度器如何知道拓扑？"),
            Words(
                "Labels of nodes (rack, block, spine) in Kubernetes with Kueue's topology-aware scheduling, "
                "topology.conf in Slurm, placement groups in Ray; or measured by a pairwise probe.",
                "Kubernetes 用节点标签（rack/block/spine）配合 Kueue 的拓扑感知调度，Slurm 用 topology.conf，Ray 用 "
                "placement group；或用两两探测实测。",
            ),
        ),
        Question(
            Words("Wait for one rack or start spread?", "等整机架，还是先跨机架跑？"),
            Words(
                "Start spread if the wait exceeds slowdown x duration: 25% slower over ten hours is worth 2.5 hours "
                "of waiting, for a ten minute job two minutes.",
                "若等待超过 减速比×时长 就先跑：10 小时作业慢 25% 值 2.5 小时等待，10 分钟作业只值两分钟。",
            ),
        ),
    ),
    seconds=4.0,
)
