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
from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
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
        found = burn_together(blocks, places)
        walls[name] = max(one.wall_s for one in found)
        share[name] = [one.cpu_s / one.wall_s for one in found]
        pushed = sum(one.pushed for one in found)
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


LAB = Lab(
    name="affinity",
    area="linux",
    title=Words("Two busy processes on one core", "两个繁忙进程挤在一个核上"),
    hypothesis=Words(
        "Pinned to the same core, two busy processes get equal shares that add up to one core at most, however many "
        "cores are idle; our probe counts the cores of the mask, not those of the machine.",
        "把两个繁忙进程绑定到同一个核，两者份额相等、合计不超过一个核，不管别的核多空闲；"
        "本项目的探测按亲和性掩码计核，而不是按整机核数。",
    ),
    run=run,
    causes=(
        Words(
            "the two have different weights: nice values, or cgroups with unequal cpu.weight",
            "两者权重不同：nice 值不同，或所在 cgroup 的 cpu.weight 不同",
        ),
        Words(
            "the run was shorter than a few time slices of the scheduler",
            "测量时间太短，只有几个调度时间片",
        ),
    ),
    code=("cairn/hw/host.py:read_cpu", "cairn/train/data/ordered_pool.py:available_cores"),
    reading=(
        "The Linux Scheduler: a Decade of Wasted Cores (2016)",
        "sched(7), Linux manual pages",
    ),
    questions=(
        Question(
            Words(
                "Why does a training job pin its ranks to the cores near their GPU?",
                "训练任务为什么要把各 rank 绑定到靠近其 GPU 的核？",
            ),
            Words(
                "Launches and copies then stay on the GPU's own socket: remote memory costs 1.5 to 2 times the "
                "latency, and a rank that wanders loses its caches. One straggling rank slows every collective.",
                "下发 kernel 和拷贝都留在 GPU 所在的插槽：跨插槽内存延迟是 1.5–2 倍，进程漂移还会丢缓存；"
                "而只要一个 rank 慢，整个集合通信都慢。",
            ),
        ),
        Question(
            Words(
                "os.cpu_count() says 64 and the program is slow in a container. Why?",
                "os.cpu_count() 返回 64，但容器里的程序很慢，为什么？",
            ),
            Words(
                "It counts the machine. The mask (sched_getaffinity) or the cgroup quota may allow four; 64 threads "
                "on "
                "four cores preempt each other. Size pools by the mask and the quota.",
                "它数的是整机的核。掩码（sched_getaffinity）或 cgroup 配额可能只给 4 个核，64 个线程会互相抢占；"
                "线程池应按掩码和配额来定。",
            ),
        ),
        Question(
            Words(
                "When does pinning do harm?",
                "什么时候绑核反而有害？",
            ),
            Words(
                "When the load is uneven or others are pinned to the same core: the scheduler may not move a process "
                "to an idle core, so it waits beside free ones.",
                "负载不均，或别人也绑在同一个核上时：调度器不能把进程移到空闲核，只能守着繁忙核等待。",
            ),
        ),
    ),
    needs=("linux", "2 cores"),
    seconds=2.5,
)
