"""Two jobs need six GPUs each, there are eight, and they are handed out one by one. Who runs?

    pod by pod       A A A B B A B B        A has 4, B has 4, both wait for ever
    all or nothing   A A A A A A . .        A runs, B waits for A

How often the first way ends in a deadlock is a matter of counting; here it is counted exactly, drawn many times, and
held against a scheduler that starts only whole gangs.
"""

import random
from functools import cache

from cairn.labs.lab import Check, Lab, Outcome, Plot, Points, Question, Rows, Table, Words
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
    from cairn.cluster.simulate.jobs import Cluster, Job
    from cairn.cluster.simulate.policies import POLICIES
    from cairn.cluster.simulate.replay import replay

    times = bench.pick(40_000, 5_000)
    draw = random.Random(1)
    rows, exact, tried = [], [], []
    for need in range(4, 9):
        bench.step(f"two jobs of {need} GPUs")
        exact.append((float(need), deadlock_chance(need, need, GPUS)))
        tried.append((float(need), drawn(need, need, times, draw)))
        rows.append([need, exact[-1][1], tried[-1][1]])
    bench.step("the same with whole gangs")
    count = bench.pick(400, 100)
    jobs = [
        Job(id=i, submit=float(i // 2), duration=10.0, limit=20.0, gpus=draw.randint(4, GPUS))
        for i in range(count)
    ]
    history = replay(Cluster(nodes=1, gpus=GPUS), jobs, POLICIES["fifo"])
    done = sum(story.state == "done" for story in history.stories.values())
    return Outcome(
        checks=[
            Check(
                what=Words("chance of a deadlock, two jobs of 6", "两个 6 卡作业死锁的概率"),
                predicted=deadlock_chance(6, 6, GPUS),
                measured=dict(tried)[6.0],
                unit="",
                within=0.05,
            ),
            Check(
                what=Words("chance with two jobs of 4: they fit", "两个 4 卡作业：放得下"),
                predicted=0.0,
                measured=dict(tried)[4.0],
                unit="",
            ),
            Check(
                what=Words(
                    "gangs that ran to their end, all or nothing", "全有或全无时完成的作业数"
                ),
                predicted=count,
                measured=done,
                unit="jobs",
            ),
        ],
        plots=[_plot(exact, tried)],
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


LAB = Lab(
    name="gang-deadlock",
    area="cluster",
    title=Words("Gangs: all or nothing", "gang 调度：全有或全无"),
    hypothesis=Words(
        "Handing out GPUs one by one to two jobs of six on eight GPUs deadlocks in seven cases of ten; a scheduler "
        "that starts whole gangs only never does.",
        "在 8 卡上把 GPU 逐个发给两个 6 卡作业，十次里约七次死锁；只启动完整 gang 的调度器永远不会。",
    ),
    run=run,
    causes=(
        Words("too few draws", "抽样次数太少"),
        Words(
            "jobs do not ask in random order: one controller creates all its pods first",
            "真实作业并非随机交错：控制器会先建完自己的 pod",
        ),
    ),
    code=(
        "cairn/cluster/simulate/policies.py:decide_in_order",
        "cairn/cluster/simulate/replay.py:replay",
        "cairn/cluster/backends/k8s_train.py",
    ),
    reading=(
        "Gandiva: Introspective Cluster Scheduling for Deep Learning (2018)",
        "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads (2019)",
    ),
    questions=(
        Question(
            Words(
                "Why does Kubernetes deadlock by default, and what prevents it?",
                "Kubernetes 默认为什么会死锁，如何避免？",
            ),
            Words(
                "Its scheduler places pod by pod and knows no group. Kueue admits a job's whole quota first; "
                "Volcano and coscheduling hold pods back until the whole PodGroup fits.",
                "它的调度器逐个 pod 放置，不知道“组”。Kueue 先按整个作业的配额准入；Volcano 和 coscheduling 让 "
                "PodGroup 凑齐才绑定。",
            ),
        ),
        Question(
            Words("What do gangs cost?", "gang 调度的代价是什么？"),
            Words(
                "GPUs stand idle while a large gang collects, or small jobs pass it for ever. Backfill with a "
                "reservation gives both: others may use the gap if they end before the gang can start.",
                "大 gang 凑资源时 GPU 空闲，或者小作业一直插队饿死它。带预留的 backfill 兼顾两者：能在 gang "
                "启动前结束的作业才可用空隙。",
            ),
        ),
        Question(
            Words("Is a timeout and release an answer?", "超时后释放算解决方案吗？"),
            Words(
                "It turns a deadlock into a livelock: both give back and try again, with the same chance each time, "
                "while GPUs are held for nothing.",
                "它只是把死锁变成活锁：双方释放后重试，每次成功概率不变，期间 GPU 白白占着。",
            ),
        ),
    ),
    seconds=1.0,
)
