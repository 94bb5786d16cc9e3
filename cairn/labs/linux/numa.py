"""Is all memory equally near? The distance table of the kernel says how far, random reads show it.

    node 0 [cores 0-31] ── memory 0     distance 10: local
         └─────── link ── memory 1     distance 21: about twice the latency

Memory lies on the node whose core touched it first. So: touch from one node, read from another, and compare with what
the table promises. A machine with one node is the simplest case: the table has a single 10, and both cores are equal.
"""

import os
import time
from pathlib import Path

from cairn.hw.host import read_numa
from cairn.hw.machine import NumaNode
from cairn.labs.lab import Check, Lab, Outcome, Question, Rows, Table, Words
from cairn.labs.linux._partner import allowed_cpus
from cairn.labs.workbench import Workbench

FOLDER = Path("/sys/devices/system/node")


def run(bench: Workbench) -> Outcome:
    allowed = allowed_cpus()
    nodes = [node for node in read_numa(Path("/")) if set(node.cpus) & set(allowed)]
    nodes = nodes or [NumaNode(node=0, cpus=allowed)]
    here = nodes[0]
    reader = sorted(set(here.cpus) & set(allowed))[0]
    bench.step("memory of the own node")
    size = bench.pick(256 << 20, 64 << 20)
    local = read_ns(reader, reader, size)
    rows = [[f"node {here.node}", reader, 10, local, 1.0]]
    checks = []
    for node in nodes[1:] or [here]:
        toucher = sorted(set(node.cpus) & set(allowed))[-1]
        distance = distance_of(here.node, node.node)
        bench.step(f"memory touched by core {toucher}")
        found = read_ns(toucher, reader, size)
        rows.append([f"node {node.node}", toucher, distance, found, found / local])
        checks.append(
            Check(
                what=Words(
                    f"read of node {node.node}'s memory over local",
                    f"读节点 {node.node} 内存与本地之比",
                ),
                predicted=distance / 10,
                measured=found / local,
                unit="x",
                within=0.4,
            )
        )
    covered = sorted(cpu for node in nodes for cpu in node.cpus if cpu in allowed)
    checks.append(
        Check(
            what=Words("cores that belong to a node", "归属某节点的核数"),
            predicted=len(allowed),
            measured=len(covered),
            unit="cores",
        )
    )
    return Outcome(
        checks=checks,
        table=_table(rows),
        notes=[
            Words(
                f"This machine has {len(nodes)} node(s). With one node the expected ratio is 1.",
                f"本机有 {len(nodes)} 个 NUMA 节点；只有一个节点时比值应为 1。",
            )
        ],
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("memory on", "内存所在"),
            Words("touched by core", "由哪个核触碰"),
            Words("distance", "距离"),
            Words("ns per random read", "每次随机读纳秒"),
            Words("over local", "与本地之比"),
        ],
        rows=rows,
    )


def distance_of(source: int, target: int, folder: Path = FOLDER) -> float:
    """The kernel's number: 10 is local, 20 about twice as far; 10 where there is no table."""
    try:
        row = (folder / f"node{source}" / "distance").read_text().split()
        names = sorted(int(one.name[4:]) for one in folder.glob("node[0-9]*"))
        return float(row[names.index(target)])
    except (OSError, ValueError, IndexError):
        return 10.0


def read_ns(toucher: int, reader: int, size: int) -> float:
    """Random reads by one core in memory that another core touched first."""
    import numpy as np

    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {toucher})
        memory = np.zeros(size // 8, np.int64)
        memory[:: 4096 // 8] = 1  # here the pages get their place
        places = np.random.default_rng(0).integers(0, len(memory), 200_000)
        os.sched_setaffinity(0, {reader})
        memory.take(places)
        samples = []
        for _ in range(7):
            began = time.thread_time()  # another program on the core must not count
            memory.take(places)
            samples.append((time.thread_time() - began) / len(places) * 1e9)
        return min(samples)
    finally:
        os.sched_setaffinity(0, before)


LAB = Lab(
    name="numa",
    area="linux",
    title=Words("Near and far memory", "近处与远处的内存"),
    hypothesis=Words(
        "A random read of memory that another node touched first takes distance/10 times as long as a local one; on "
        "a "
        "machine with one node it makes no difference which core touched it.",
        "随机读另一节点首次触碰的内存，耗时是本地的“距离/10”倍；单节点机器上由哪个核触碰没有区别。",
    ),
    run=run,
    causes=(
        Words(
            "many reads in flight hide part of the distance",
            "大量并发读掩盖了部分距离",
        ),
        Words(
            "NUMA balancing moved the pages to the reader, or a neighbour used the memory bus",
            "NUMA balancing 把页迁到了读者一侧，或邻居占用了内存总线",
        ),
    ),
    code=("cairn/hw/host.py:read_numa", "cairn/hw/transfer_path.py", "cairn/hw/checks_host.py"),
    reading=(
        "What Every Programmer Should Know About Memory (2007)",
        "numa(7), Linux manual pages",
    ),
    questions=(
        Question(
            Words(
                "What is first touch, and how does it go wrong?",
                "什么是 first touch？它会怎样出错？",
            ),
            Words(
                "A page lies on the node whose core wrote it first. When one thread initialises everything, all "
                "memory "
                "sits on its node and the other sockets read across the link.",
                "页落在首次写它的核所在的节点。若由一个线程初始化所有数据，内存都在它那一侧，其他插槽只能跨链路读。",
            ),
        ),
        Question(
            Words(
                "How do you see that a process reads remote memory?",
                "如何看出一个进程在读远端内存？",
            ),
            Words(
                "`numastat -p PID` shows its pages per node, /proc/PID/numa_maps every mapping; compare with the "
                "cores it runs on. perf's node-load-misses counts remote reads.",
                "`numastat -p PID` 显示各节点上的页，/proc/PID/numa_maps 列出每个映射，再与它运行的核比较；"
                "perf 的 node-load-misses 统计远端读。",
            ),
        ),
        Question(
            Words(
                "Why does NUMA matter for GPU servers?",
                "NUMA 对 GPU 服务器为什么重要？",
            ),
            Words(
                "Each GPU and NIC hangs on one socket. A rank on the other one copies through the socket link: often "
                "30 to 50% less host-to-device bandwidth. Bind ranks by the GPU's numa_node.",
                "每块 GPU 和网卡都挂在某个插槽上。rank 在另一插槽时拷贝要穿过插槽互连，主机到设备带宽常降 30–50%；"
                "应按 GPU 的 numa_node 绑定。",
            ),
        ),
    ),
    needs=("linux",),
    seconds=2.0,
)
