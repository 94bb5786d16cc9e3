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
from cairn.labs.lab import Check, Outcome, Rows, Table, Words, described
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
        latency_ns = read_ns(toucher, reader, size)
        rows.append([f"node {node.node}", toucher, distance, latency_ns, latency_ns / local])
        checks.append(
            Check(
                what=Words(
                    f"read of node {node.node}'s memory over local",
                    f"读节点 {node.node} 内存与本地之比",
                ),
                predicted=distance / 10,
                measured=latency_ns / local,
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


LAB = described(__file__, run)
