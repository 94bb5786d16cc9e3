"""Can a network that never drops stop for ever? When paused links wait for each other in a circle.

    switch 0 --> switch 1 --> switch 2 --> switch 3 --> switch 0      every flow goes over `hops` links of the ring

The paths alone say whether a circle of waits is possible (`can_deadlock`); then bytes are moved through queues with
pause frames, and either everything arrives or nothing moves any more. Routes up and down a tree have no circle.
"""

from typing import TYPE_CHECKING

from cairn.comm.simulate.lossless import can_deadlock, circle
from cairn.comm.simulate.topology import route, topology
from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.comm.simulate.lossless import Story

LARGE = 4 << 20
SMALL = 64 << 10  # fits into the buffers of the way


def run(bench: Workbench) -> Outcome:
    import numpy as np

    rows, wrong, stuck = [], 0, 0
    for switches in bench.pick((3, 4, 6, 8), (4, 6)):
        for hops in range(1, switches):
            bench.step(f"a ring of {switches} switches, flows over {hops} of its links")
            paths, story = circle(switches, LARGE, hops=hops)
            possible, happened = bool(can_deadlock(paths)), bool(story.deadlock)
            wrong += happened and not possible
            wrong += possible and not happened and hops > 2
            stuck += happened
            rows.append([switches, hops, _said(possible), _said(happened), len(story.deadlock)])
    bench.step("the same ring with little to send")
    _, small = circle(4, SMALL, hops=3)
    bench.step("a fat tree, everybody to everybody")
    top = topology("fat-tree", 64, domain=8, radix=8)
    ends = np.arange(64)
    pairs = [(a, b) for a in ends for b in ends if a != b]
    source, target = (np.array(side) for side in zip(*pairs, strict=True))
    tree = can_deadlock(route(top, source, target, 0))
    return Outcome(
        checks=_checks(wrong, stuck, small, tree),
        table=Table(
            columns=[
                Words("switches", "交换机数"),
                Words("hops", "经过链路数"),
                Words("circle possible", "可能成环"),
                Words("deadlock", "发生死锁"),
                Words("links in it", "涉及链路数"),
            ],
            rows=rows,
        ),
    )


def _checks(wrong: int, stuck: int, small: "Story", tree: tuple[int, ...]) -> list[Check]:
    return [
        Check(
            what=Words("rings where the paths mislead", "路径判断与实际不符的环"),
            predicted=0,
            measured=wrong,
            unit="rings",
        ),
        Check(
            what=Words("rings that stop for ever", "永远停住的环"),
            predicted=1,
            measured=stuck,
            unit="rings",
            kind="at_least",
        ),
        Check(
            what=Words("deadlock with 64 KiB a flow", "每条流仅 64 KiB 时的死锁"),
            predicted=0,
            measured=len(small.deadlock),
            unit="links",
        ),
        Check(
            what=Words("circle in the routes of a fat tree", "fat tree 路由中的环"),
            predicted=0,
            measured=len(tree),
            unit="links",
        ),
    ]


def _said(value: bool) -> str:
    return "yes" if value else "no"


LAB = Lab(
    name="pfc",
    area="comm",
    title=Words("Pause frames and deadlock", "PFC 暂停帧与死锁"),
    hypothesis=Words(
        "Where the links of all paths form no circle there is no deadlock; where they do, "
        "flows over three or more links "
        "of a ring stop for ever once queues fill, and not before. Up-down routes of a fat tree have no circle.",
        "所有路径的链路不成环就不会死锁；成环时，跨三条以上环链路的流在队列填满后永远停住，之前"
        "不会。fat tree 的上下行路由没有环。",
    ),
    run=run,
    causes=(
        Words(
            "whether a possible deadlock happens depends on timing: who fills which queue first",
            "可能的死锁是否发生取决于时序：谁先填满哪个队列",
        ),
        Words(
            "buffers larger than what is sent hide it",
            "缓冲区大于发送量时看不到",
        ),
    ),
    code=(
        "cairn/comm/simulate/lossless.py:can_deadlock",
        "cairn/comm/simulate/lossless.py:circle",
        "cairn/comm/simulate/topology.py:route",
    ),
    reading=(
        "RDMA over Commodity Ethernet at Scale (2016)",
        "Deadlocks in Datacenter Networks: Why Do They Form, and How to Avoid Them (2016)",
        "IEEE 802.1Qbb Priority-based Flow Control (2011)",
    ),
    questions=(
        Question(
            Words("What are the conditions for a PFC deadlock?", "PFC 死锁的条件是什么？"),
            Words(
                "A cyclic buffer dependency: a circle of links, each of whose queues holds "
                "bytes for the next one, and all "
                "of them above the pause threshold at the same time.",
                "循环缓冲依赖：一圈链路，每个队列里都有要发往下一条链路的数据，且同时超过暂停阈值。",
            ),
        ),
        Question(
            Words("Why does RoCE want PFC at all?", "RoCE 为什么需要 PFC？"),
            Words(
                "Classic RoCE NICs recover from a loss by going back to the lost packet and "
                "sending everything again; a "
                "drop rate of 0.1% can cost most of the throughput, so the fabric is made lossless.",
                "传统 RoCE 网卡丢包后按 go-back-N 全部重发，0.1% 的丢包就可能损失大部分吞吐，所以要让网络无损。",
            ),
        ),
        Question(
            Words("How do operators keep deadlocks away?", "运维上如何避免死锁？"),
            Words(
                "Up-down routing only, also after failures; a watchdog that drops a queue "
                "paused too long; and ECN early "
                "enough that pauses stay rare.",
                "只允许上下行路由（故障后也一样）；看门狗丢弃暂停过久的队列；ECN 提前介入使暂停很少发生。",
            ),
        ),
    ),
    seconds=3.0,
)
