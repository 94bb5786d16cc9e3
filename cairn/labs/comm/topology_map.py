"""Does it matter which rank sits where? Same bytes, same links, another order.

    two_level    reduce inside a node (NVLink), along each rail (its own NIC), spread inside the node
    flat ring    round all GPUs: every chunk crosses a NIC, and the slowest link sets the pace of all

Both are proved schedules, run operation by operation on the links of a rail fabric; then the doctor is shown a cluster
whose ranks were numbered across the hosts.
"""

from cairn.comm.doctor.findings import PairProbe, RankFacts
from cairn.comm.doctor.pairs import examine_probe
from cairn.comm.schedule.catalogue import make
from cairn.comm.simulate.schedule_run import run_schedule
from cairn.comm.simulate.topology import topology
from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
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


def _interleaved() -> PairProbe:
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
    return PairProbe(bytes=64 << 10, facts=facts, pair_us=table, compute_us=[1000.0] * 4)


LAB = described(__file__, run)
