"""Can a network that never drops stop for ever? When paused links wait for each other in a circle.

    switch 0 --> switch 1 --> switch 2 --> switch 3 --> switch 0      every flow goes over `hops` links of the ring

The paths alone say whether a circle of waits is possible (`can_deadlock`); then bytes are moved through queues with
pause frames, and either everything arrives or nothing moves any more. Routes up and down a tree have no circle.
"""

from typing import TYPE_CHECKING

from cairn.comm.simulate.lossless import can_deadlock, circle
from cairn.comm.simulate.topology import route, topology
from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.comm.simulate.lossless import FlowHistory

LARGE = 4 << 20
SMALL = 64 << 10  # fits into the buffers of the way


def run(bench: Workbench) -> Outcome:
    import numpy as np

    rows, wrong, stuck = [], 0, 0
    for switches in (3, 4, 6, 8):
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


def _checks(wrong: int, stuck: int, small: "FlowHistory", tree: tuple[int, ...]) -> list[Check]:
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


LAB = described(__file__, run)
