"""A gang of 64 GPUs is spread over four racks instead of one. What does that cost it, and who can prevent it?

    rack switch  ----+----  ----+----          within a rack: full speed; between racks: shared uplinks
      nodes      n n n n    n n n n

The scheduler's `topology` policy keeps gangs in few racks; what spreading costs a training step comes from the
comm model.
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.cluster.simulate.summary import ReplaySummary

SLOWDOWN = 0.25  # a spread gang takes this much longer, in the replay


def run(bench: Workbench) -> Outcome:
    import msgspec

    from cairn.cluster.simulate.policies import POLICIES
    from cairn.cluster.simulate.replay import ReplaySettings, replay
    from cairn.cluster.simulate.summary import summarise
    from cairn.cluster.simulate.traces import made_to_measure, synthetic
    from cairn.plan.device import device
    from cairn.plan.train_cost import collective

    jobs = synthetic(bench.setting("jobs", bench.pick(1200, 400)), seed=8).jobs
    jobs = [msgspec.structs.replace(job, gpus=min(job.gpus, 32), least=0) for job in jobs]
    cluster, _ = made_to_measure(jobs, gpus=8, rack=4, load=0.7)
    rows, summaries = [], {}
    for name in ("easy", "topology"):
        bench.step(f"{len(jobs)} jobs, {name}")
        summaries[name] = one = summarise(
            replay(cluster, jobs, POLICIES[name], ReplaySettings(spread_slowdown=SLOWDOWN))
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
        checks=_checks(summaries, times),
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


def _checks(summaries: dict[str, "ReplaySummary"], times: dict[str, float]) -> list[Check]:
    return [
        Check(
            what=Words(
                "share of gangs over more racks than needed, topology",
                "拓扑策略下跨多余机架的 gang 比例",
            ),
            predicted=0.05,
            measured=summaries["topology"].spread_gangs,
            unit="share",
            kind="at_most",
        ),
        Check(
            what=Words(
                "share of gangs over more racks than needed, without",
                "无拓扑感知时跨多余机架的 gang 比例",
            ),
            predicted=0.25,
            measured=summaries["easy"].spread_gangs,
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


LAB = described(__file__, run)
