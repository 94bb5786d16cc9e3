"""Two jobs need six GPUs each, there are eight, and they are handed out one by one. Who runs?

    pod by pod       A A A B B A B B        A has 4, B has 4, both wait for ever
    all or nothing   A A A A A A . .        A runs, B waits for A

How often the first way ends in a deadlock is a matter of counting; here it is counted exactly, drawn many times, and
held against a scheduler that starts only whole gangs.
"""

import random
from functools import cache

from cairn.labs.lab import Check, Outcome, Plot, Points, Rows, Table, Words, described
from cairn.labs.workbench import Workbench

GPUS = 8


@cache
def deadlock_chance(a: int, b: int, free: int) -> float:
    """Jobs still lack `a` and `b` GPUs; each next GPU goes to either with equal chance."""
    if a == 0 or b == 0:
        return 0.0  # one is complete: it runs, ends, and gives all of its GPUs back
    if free == 0:
        return 1.0
    return (deadlock_chance(a - 1, b, free - 1) + deadlock_chance(a, b - 1, free - 1)) / 2


def drawn(a: int, b: int, times: int, draw: random.Random) -> float:
    """The same by trying: the share of runs in which both hold something and neither can go on."""
    stuck = 0
    for _ in range(times):
        lack, free = [a, b], GPUS
        while free and all(lack):
            lack[draw.randrange(2)] -= 1
            free -= 1
        stuck += all(lack)
    return stuck / times


def run(bench: Workbench) -> Outcome:
    from cairn.cluster.simulate.jobs import SimulatedCluster, SimulatedJob
    from cairn.cluster.simulate.policies import POLICIES
    from cairn.cluster.simulate.replay import replay

    times = bench.setting("draws", bench.pick(40_000, 5_000))
    draw = random.Random(1)
    rows, exact, sampled = [], [], []
    for need in range(4, 9):
        bench.step(f"two jobs of {need} GPUs")
        exact.append((float(need), deadlock_chance(need, need, GPUS)))
        sampled.append((float(need), drawn(need, need, times, draw)))
        rows.append([need, exact[-1][1], sampled[-1][1]])
    bench.step("the same with whole gangs")
    count = bench.pick(400, 100)
    jobs = [
        SimulatedJob(
            id=i, submit=float(i // 2), duration=10.0, limit=20.0, gpus=draw.randint(4, GPUS)
        )
        for i in range(count)
    ]
    history = replay(SimulatedCluster(nodes=1, gpus=GPUS), jobs, POLICIES["fifo"])
    completed = sum(story.state == "done" for story in history.stories.values())
    return Outcome(
        checks=[
            Check(
                what=Words("chance of a deadlock, two jobs of 6", "两个 6 卡作业死锁的概率"),
                predicted=deadlock_chance(6, 6, GPUS),
                measured=dict(sampled)[6.0],
                unit="",
                within=0.05,
            ),
            Check(
                what=Words("chance with two jobs of 4: they fit", "两个 4 卡作业：放得下"),
                predicted=0.0,
                measured=dict(sampled)[4.0],
                unit="",
            ),
            Check(
                what=Words(
                    "gangs that ran to their end, all or nothing", "全有或全无时完成的作业数"
                ),
                predicted=count,
                measured=completed,
                unit="jobs",
            ),
        ],
        plots=[_plot(exact, sampled)],
        table=_table(rows),
    )


def _plot(exact: Points, tried: Points) -> Plot:
    return Plot(
        title=Words("Pod by pod on 8 GPUs", "8 卡上逐个分配"),
        x=Words("GPUs that each of two jobs needs", "每个作业需要的 GPU 数"),
        y=Words("chance of a deadlock", "死锁概率"),
        lines={"counted": exact, "drawn": tried},
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("GPUs each", "每作业 GPU 数"),
            Words("deadlock, counted", "死锁概率（计算）"),
            Words("deadlock, drawn", "死锁概率（抽样）"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
