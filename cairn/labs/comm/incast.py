"""What happens when everybody sends to one receiver? It takes n times as long, and others pay for it too.

    sender 1 --\\
    sender 2 ---> leaf ==uplink==> leaf --port--> receiver       the port is the bottleneck
    bystander -/                        `-------> its own port   only shares the uplink, and is stopped as well

A lossless fabric does not drop: a full queue pauses the link that feeds it, whatever flows are on it. The simulator
moves bytes tick by tick through queues with pause frames.
"""

from cairn.comm.simulate.lossless import incast
from cairn.labs.lab import Check, Outcome, Plot, Points, Rows, Table, Words, described
from cairn.labs.workbench import Workbench

NIC_GB_PER_S = 50.0
SIZE = 1 << 20


def run(bench: Workbench) -> Outcome:
    alone_us = SIZE / (NIC_GB_PER_S * 1e3)
    crowd, bystander, ideal, rows = [], [], [], []
    for senders in (*bench.pick((1, 2, 4, 8, 16), (1, 4)), bench.size("senders")):
        bench.step(f"{senders} senders, one receiver")
        story = incast(senders, SIZE, NIC_GB_PER_S)
        last, victim = float(story.finish_us[:-1].max()), float(story.finish_us[-1])
        crowd.append((float(senders), last))
        bystander.append((float(senders), victim))
        ideal.append((float(senders), senders * alone_us))
        rows.append([senders, senders * alone_us, last, victim, float(story.paused_us.max())])
    many = crowd[-1][0]
    return Outcome(
        checks=[
            Check(
                what=Words(
                    f"the last of {many:.0f} senders is done",
                    f"{many:.0f} 个发送者中最后完成的时间",
                ),
                predicted=many * alone_us,
                measured=crowd[-1][1],
                unit="us",
                within=0.1,
            ),
            Check(
                what=Words("how much slower the bystander is", "旁观流变慢的倍数"),
                predicted=4.0,
                measured=bystander[-1][1] / bystander[0][1],
                unit="x",
                kind="at_least",
            ),
            Check(
                what=Words("the uplink was stopped", "上行链路被暂停的时间"),
                predicted=alone_us,
                measured=rows[-1][4],
                unit="us",
                kind="at_least",
            ),
        ],
        plots=[_plot(ideal, crowd, bystander, alone_us)],
        table=_table(rows),
    )


def _plot(ideal: Points, crowd: Points, bystander: Points, alone_us: float) -> Plot:
    return Plot(
        title=Words("1 MiB each, one receiver", "每个发送 1 MiB，同一接收者"),
        x=Words("senders", "发送者数"),
        y=Words("us", "微秒"),
        lines={"receiver's port": ideal, "last sender": crowd, "bystander": bystander},
        log_x=True,
        log_y=True,
        limit=("bystander alone", alone_us),
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("senders", "发送者数"),
            Words("predicted us", "预测 us"),
            Words("last sender us", "最后完成 us"),
            Words("bystander us", "旁观流 us"),
            Words("longest pause us", "最长暂停 us"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
