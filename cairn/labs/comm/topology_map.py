"""Does it matter which rank sits where? Same bytes, same links, another order.

    two_level    reduce inside a node (NVLink), along each rail (its own NIC), spread inside the node
    flat ring    round all GPUs: every chunk crosses a NIC, and the slowest link sets the pace of all

Both are proved schedules, run operation by operation on the links of a rail fabric; then the doctor is shown a cluster
whose ranks were numbered across the hosts.
"""

from cairn.comm.doctor.findings import Probe, RankFacts
from cairn.comm.doctor.pairs import examine_probe
from cairn.comm.schedule.catalogue import make
from cairn.comm.simulate.schedule_run import run_schedule
from cairn.comm.simulate.topology import topology
from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
from cairn.labs.workbench import Workbench

GPUS = 8
NVLINK, NIC = 360.0, 50.0


def predicted_us(name: str, nodes: int, size: int) -> float:
    """Bytes of a GPU over NVLink and over its NIC, one after the other."""
    ranks = nodes * GPUS
    if name == "ring":  # the NIC is the slowest link of the ring
        return 2 * (ranks - 1) / ranks * size / (NIC * 1e3)
    near = 2 * (GPUS - 1) / GPUS * size / (NVLINK * 1e3)
    return near + 2 * (nodes - 1) / nodes * size / GPUS / (NIC * 1e3)


def run(bench: Workbench) -> Outcome:
    size = 256 << 20
    rows: list[list[str | float | int]] = []
    lines: dict[str, list[tuple[float, float]]] = {"ring": [], "two_level": []}
    worst: dict[str, tuple[float, float]] = {}
    for nodes in bench.pick((2, 4, 8), (2, 4)):
        top = topology("rail-1tier", nodes * GPUS, nvlink_gb_per_s=NVLINK, nic_gb_per_s=NIC)
        for name in lines:
            bench.step(f"{name} on {nodes} nodes of {GPUS}")
            schedule = make("all_reduce", name, nodes * GPUS, gpus=GPUS)
            us = run_schedule(schedule, top, size).us
            worst[name] = (predicted_us(name, nodes, size), us)
            lines[name].append((float(nodes), us))
            rows.append([nodes, name, worst[name][0], us])
    bench.step("ranks numbered across two hosts: what the doctor says")
    findings = examine_probe(_interleaved())
    mapped = sum(one.cause == "rank mapping" for one in findings)
    return Outcome(
        checks=_checks(worst, mapped),
        plots=[
            Plot(
                title=Words(
                    "All-reduce of 256 MiB, 8 GPUs a node", "256 MiB 的 all-reduce，每节点 8 GPU"
                ),
                x=Words("nodes", "节点数"),
                y=Words("us", "微秒"),
                lines=lines,
                log_y=True,
            )
        ],
        table=Table(
            columns=[
                Words("nodes", "节点数"),
                Words("schedule", "算法"),
                Words("predicted us", "预测 us"),
                Words("simulated us", "模拟 us"),
            ],
            rows=rows,
        ),
        notes=[
            Words(f"{one.where}: {one.evidence[0]}", f"{one.where}：{one.evidence[0]}")
            for one in findings
        ],
    )


def _checks(worst: dict[str, tuple[float, float]], mapped: int) -> list[Check]:
    return [
        *[
            Check(
                what=Words(f"{name}, most nodes", f"{name}，最多节点"),
                predicted=expected,
                measured=measured,
                unit="us",
                within=0.25,
            )
            for name, (expected, measured) in worst.items()
        ],
        Check(
            what=Words("flat ring over two levels", "平铺 ring 与两级方案的耗时比"),
            predicted=worst["ring"][0] / worst["two_level"][0],
            measured=worst["ring"][1] / worst["two_level"][1],
            unit="x",
            within=0.25,
        ),
        Check(
            what=Words("bad numberings that the doctor names", "doctor 指出的错误编号"),
            predicted=1,
            measured=mapped,
            unit="findings",
        ),
    ]


def _interleaved() -> Probe:
    """Even ranks on one host, odd ones on the other: quick within, slow between."""
    hosts = ["host0", "host1", "host0", "host1"]
    facts = [
        RankFacts(rank=rank, host=host, interface="eth0", address=f"10.0.0.{rank + 1}")
        for rank, host in enumerate(hosts)
    ]
    table = [
        [[] if a == b else [100.0 if hosts[a] == hosts[b] else 5000.0] * 6 for b in range(4)]
        for a in range(4)
    ]
    return Probe(bytes=64 << 10, facts=facts, pair_us=table, compute_us=[1000.0] * 4)


LAB = Lab(
    name="topology-map",
    area="comm",
    title=Words("Which rank sits where", "rank 放在哪里"),
    hypothesis=Words(
        "An all-reduce that reduces inside each node first sends only an eighth of the vector "
        "over each NIC, so on nodes of "
        "eight it beats a flat ring by the ratio that bytes and link rates give: about four.",
        "先在节点内归约的 all-reduce 每块网卡只传向量的八分之一，因此 8 卡节点上比平铺 ring 快的"
        "倍数由字节和链路速率决定，约四倍。",
    ),
    run=run,
    causes=(
        Words(
            "latency: with many nodes a ring along the rails waits often",
            "延迟：节点多时沿 rail 的 ring 等待次数多",
        ),
        Words(
            "stages overlap: chunks that are through NVLink travel while others are still reduced",
            "阶段重叠：已归约完的块先上网络，其余仍在节点内归约",
        ),
    ),
    code=(
        "cairn/comm/schedule/hierarchical.py:two_level_gather",
        "cairn/comm/simulate/topology.py:topology",
        "cairn/comm/doctor/pairs.py:examine_probe",
    ),
    reading=(
        "Alibaba HPN: A Data Center Network for Large Language Model Training (2024)",
        "Rail-only: A Low-Cost High-Performance Network for Training LLMs with Trillion Parameters (2024)",
    ),
    questions=(
        Question(
            Words("What is a rail?", "什么是 rail？"),
            Words(
                "The network that joins the k-th GPU of every node through its own NIC: "
                "traffic between equal places of "
                "nodes needs one switch hop, and everything else goes over NVLink first.",
                "把每个节点的第 k 块 GPU 经各自网卡连在一起的网络：同号 GPU 之间一跳可达，其余流量先走 NVLink。",
            ),
        ),
        Question(
            Words(
                "In which order should ranks be numbered, and which parallelism goes innermost?",
                "rank 应按什么顺序编号，最内层放哪种并行？",
            ),
            Words(
                "Host by host; tensor parallel innermost, because it communicates most and waits for it, then context, "
                "pipeline, and data parallel outermost.",
                "按主机连续编号；最内层放 tensor parallel（通信最多且不可掩盖），其次 context、"
                "pipeline，最外层 data parallel。",
            ),
        ),
        Question(
            Words("How do you see the map of a machine?", "如何查看一台机器的拓扑？"),
            Words(
                "`nvidia-smi topo -m` for NVLink, PCIe and NUMA between GPUs and NICs; "
                "NCCL_DEBUG=INFO for the rings that "
                "NCCL made of it; `cairn doctor` for what this project found.",
                "`nvidia-smi topo -m` 看 GPU 与网卡间的 NVLink、PCIe、NUMA 关系；NCCL_DEBUG=INFO 看 NCCL 据此建的环；"
                "`cairn doctor` 看本项目的发现。",
            ),
        ),
    ),
    seconds=4.0,
)
