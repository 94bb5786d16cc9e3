"""Which cores may a process use, and what happens when two busy ones are pinned to the same?

    one core each    A ████████            together on one core    A █ █ █ █ █ █ █ █
                     B ████████                                    B  █ █ █ █ █ █ █ █

The scheduler divides a core fairly: two busy processes on one core get equal shares that add up to one core at most, so
on an idle machine both take twice as long. The mask is what a process may use, and programs that size themselves by the
machine's cores instead overload it.
"""

import os
from pathlib import Path

from cairn.hw.host import read_cpu
from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.linux._partner import allowed_cpus, blocks_for, burn_together
from cairn.labs.workbench import Workbench


def run(bench: Workbench) -> Outcome:
    cpus = allowed_cpus()
    first, second = cpus[0], cpus[1]
    bench.step("how much work fills a moment")
    blocks = blocks_for(bench.pick(0.4, 0.15))
    rows, walls, share = [], {}, {}
    layouts = {
        "one core each": ([first], [second]),
        "both on one core": ([first], [first]),
        "left to the scheduler": (cpus, cpus),
    }
    for name, places in layouts.items():
        bench.step(name)
        burns = burn_together(blocks, places)
        walls[name] = max(one.wall_s for one in burns)
        share[name] = [one.cpu_s / one.wall_s for one in burns]
        pushed = sum(one.pushed for one in burns)
        rows.append([name, walls[name] * 1e3, *share[name], pushed])
    together = share["both on one core"]
    return Outcome(
        checks=_checks(first, together),
        table=Table(
            columns=[
                Words("where", "放置方式"),
                Words("ms", "毫秒"),
                Words("core of A", "A 占核"),
                Words("core of B", "B 占核"),
                Words("times pushed off", "被抢占次数"),
            ],
            rows=rows,
        ),
        notes=[
            Words(
                f"On one core both took {walls['both on one core'] / walls['one core each']:.2f} times as long as on "
                "two; 2.0 on an idle machine.",
                f"共用一核的耗时是各用一核的 {walls['both on one core'] / walls['one core each']:.2f} 倍；"
                f"空闲机器上应为 2.0 倍。",
            )
        ],
    )


def _checks(first: int, together: list[float]) -> list[Check]:
    return [
        Check(
            what=Words("cores our probe sees when pinned to one", "绑定到一个核后探测到的核数"),
            predicted=1,
            measured=_seen_when_pinned(first),
            unit="cores",
        ),
        Check(
            what=Words("of one core, both together", "两个进程合计占用的核"),
            predicted=1.0,
            measured=sum(together),
            unit="cores",
            kind="at_most",
            within=0.05,
        ),
        Check(
            what=Words("share of one over share of the other", "两者所得时间之比"),
            predicted=1.0,
            measured=together[0] / together[1],
            unit="x",
            within=0.25,
        ),
    ]


def _seen_when_pinned(cpu: int) -> int:
    """The mask is this process's own; it is put back at once."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        return read_cpu(Path("/")).usable_threads or 0
    finally:
        os.sched_setaffinity(0, before)


LAB = described(__file__, run)
