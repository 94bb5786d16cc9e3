"""What happens when everybody sends to one receiver? It takes n times as long, and others pay for it too.

    sender 1 --\\
    sender 2 ---> leaf ==uplink==> leaf --port--> receiver       the port is the bottleneck
    bystander -/                        `-------> its own port   only shares the uplink, and is stopped as well

A lossless fabric does not drop: a full queue pauses the link that feeds it, whatever flows are on it. The simulator
moves bytes tick by tick through queues with pause frames.
"""

from cairn.comm.simulate.lossless import incast
from cairn.labs.lab import Check, Lab, Outcome, Plot, Points, Question, Rows, Table, Words
from cairn.labs.workbench import Workbench

NIC_GB_PER_S = 50.0
SIZE = 1 << 20


def run(bench: Workbench) -> Outcome:
    alone_us = SIZE / (NIC_GB_PER_S * 1e3)
    crowd, bystander, ideal, rows = [], [], [], []
    for senders in bench.pick((1, 2, 4, 8, 16, 32, 64), (1, 4, 16)):
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


LAB = Lab(
    name="incast",
    area="comm",
    title=Words("Many senders, one receiver", "多对一：incast"),
    hypothesis=Words(
        "n senders to one port take n times as long as one, no more; but a bystander that "
        "shares only the uplink, which "
        "has room enough, becomes several times slower because pause frames stop the whole link.",
        "n 个发送者打到一个端口，耗时正好是单个的 n 倍；但只共享上行链路（带宽足够）的旁观流也会"
        "慢好几倍，因为暂停帧会停掉整条链路。",
    ),
    run=run,
    causes=(
        Words(
            "buffers: small messages fit into the queues and nobody is paused",
            "缓冲区：消息小到能放进队列，就不会触发暂停",
        ),
        Words(
            "the simulator is fluid: packets and the delay of pause frames are not in it",
            "模拟器是流体模型，没有包粒度和暂停帧传播延迟",
        ),
    ),
    code=(
        "cairn/comm/simulate/lossless.py:incast",
        "cairn/comm/simulate/lossless.py:run_lossless",
    ),
    reading=(
        "Safe and Effective Fine-grained TCP Retransmissions for Datacenter Communication (2009)",
        "RDMA over Commodity Ethernet at Scale (2016)",
        "Congestion Control for Large-Scale RDMA Deployments (2015)",
    ),
    questions=(
        Question(
            Words("Which AI workloads make incast?", "AI 负载里哪些会产生 incast？"),
            Words(
                "All-to-all of experts with a hot expert, parameter servers and checkpoints to "
                "one storage node, and the "
                "gather of a KV cache by one decoder.",
                "MoE all-to-all 遇到热点专家、参数服务器或检查点写到同一存储节点、多个预填充节点"
                "向一个解码节点传 KV cache。",
            ),
        ),
        Question(
            Words(
                "Why is the bystander hurt although its own port is idle?",
                "旁观流自己的端口空闲，为什么也会受影响？",
            ),
            Words(
                "PFC pauses a priority of a whole port, not a flow: the uplink is stopped "
                "because the queue behind it is "
                "full of the crowd's bytes. That is head-of-line blocking.",
                "PFC 暂停的是整个端口的某个优先级，而不是某条流：上行链路后面的队列被 incast 流"
                "占满，整条链路被停，这就是队头阻塞。",
            ),
        ),
        Question(
            Words("How is incast avoided in practice?", "实际中如何避免 incast？"),
            Words(
                "Schedules in which each receiver has one sender at a time (pairwise "
                "all-to-all, rings), receiver-driven "
                "credits, and ECN-based control (DCQCN) that slows senders before queues fill.",
                "让每个接收者同一时刻只有一个发送者（pairwise all-to-all、ring）、接收端驱动的信用流控，"
                "以及在队列满之前用 ECN（DCQCN）让发送端降速。",
            ),
        ),
    ),
    seconds=3.0,
)
