"""What if the switch did the sum? Half of the bytes and two waits, in whole numbers.

    ring        each rank sends 2(n-1)/n vectors and waits 2(n-1) times
    switch      each rank sends 1 vector and receives 1, and waits twice for each piece of the pool

The schedule with an aggregator is proved and run on arrays like any other. A switch has no floating point, so numbers
are scaled to integers first (SwitchML): the error is bounded before anything is sent.
"""

from typing import NamedTuple

from cairn.comm.schedule.catalogue import make
from cairn.comm.schedule.interpret import interpret
from cairn.comm.schedule.verify import verify
from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Rows, Table, Words
from cairn.labs.workbench import Workbench

BITS = 31  # of an integer with a sign
ALPHA_US = 5.0  # of a wait
VECTOR_US = (64 << 20) / (50.0 * 1e3)  # 64 MiB over a link of 50 GB/s


class Summed(NamedTuple):
    error: float  # the largest, beside a sum in float64
    bound: float  # half a unit of the scale for each rank
    apart: int  # ranks whose result is not the first one's


def scale_for(largest: float, ranks: int) -> float:
    """Integers as large as can be while the sum of all ranks still fits."""
    return (2**BITS - 1) / (largest * ranks) / 2


def run(bench: Workbench) -> Outcome:
    rows, ring_line, switch_line = [], [], []
    for ranks in bench.pick((2, 4, 8, 16, 32), (4, 16)):
        bench.step(f"ring and switch of {ranks} ranks: proofs")
        ring = verify(make("all_reduce", "ring", ranks))
        switch = verify(make("all_reduce", "switch", ranks, chunks=4, pool=4))
        ring_us = ring.steps * ALPHA_US + ring.traffic * VECTOR_US
        switch_us = 2 * ALPHA_US + switch.traffic * VECTOR_US
        ring_line.append((float(ranks), ring_us))
        switch_line.append((float(ranks), switch_us))
        rows.append((ranks, ring.traffic, switch.traffic, ring.steps, ring_us / switch_us))
    bench.step("a sum in integers, through the switch")
    added = summed(8, bench.pick(40_000, 8_000))
    return Outcome(
        checks=[*_bytes(rows), *_sums(added)],
        plots=[
            Plot(
                title=Words(
                    "All-reduce of 64 MiB by the cost model", "代价模型下 64 MiB 的 all-reduce"
                ),
                x=Words("ranks", "rank 数"),
                y=Words("us", "微秒"),
                lines={"ring": ring_line, "switch": switch_line},
                log_x=True,
                limit=("one vector", VECTOR_US),
            )
        ],
        table=_table(rows),
    )


def summed(ranks: int, numbers: int) -> Summed:
    """Vectors of every rank, scaled to integers and added by the switch's schedule."""
    import numpy as np

    rng = np.random.default_rng(0)
    vectors = [rng.standard_normal(numbers) for _ in range(ranks)]
    scale = scale_for(max(float(np.abs(v).max()) for v in vectors), ranks)
    whole = [np.round(v * scale).astype(np.int64).astype(np.int32) for v in vectors]
    everywhere = interpret(make("all_reduce", "switch", ranks, chunks=4, pool=2), whole)
    total = everywhere[0].astype(np.float64) / scale
    return Summed(
        error=float(np.abs(total - np.sum(vectors, axis=0)).max()),
        bound=ranks * 0.5 / scale,
        apart=sum(int((one != everywhere[0]).any()) for one in everywhere),
    )


def _bytes(rows: list[tuple[int, float, float, int, float]]) -> list[Check]:
    return [
        Check(
            what=Words("vectors that a rank sends", "每个 rank 发送的向量数"),
            predicted=1.0,
            measured=max(switch for _, _, switch, _, _ in rows),
            unit="vectors",
        ),
        Check(
            what=Words("bytes of a large ring over the switch", "大规模 ring 与交换机方案的字节比"),
            predicted=2.0,
            measured=rows[-1][1] / rows[-1][2],
            unit="x",
            within=0.1,
        ),
    ]


def _sums(added: Summed) -> list[Check]:
    return [
        Check(
            what=Words("largest error of the integer sum", "整数求和的最大误差"),
            predicted=added.bound,
            measured=added.error,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words("ranks whose bits differ", "结果比特不同的 rank 数"),
            predicted=0,
            measured=added.apart,
            unit="ranks",
        ),
    ]


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("ranks", "rank 数"),
            Words("ring, vectors", "ring 数据量"),
            Words("switch, vectors", "交换机数据量"),
            Words("waits of the ring", "ring 等待次数"),
            Words("speed-up", "加速比"),
        ],
        rows=rows,
    )


LAB = Lab(
    name="in-network",
    area="comm",
    title=Words("A switch that adds", "会做加法的交换机"),
    hypothesis=Words(
        "With an aggregator in the network a rank sends exactly one vector whatever the number of ranks, where a ring "
        "sends almost two; and a sum in scaled integers is the same on every rank and within n/2 units of the scale.",
        "网络中有聚合器时，无论多少 rank，每个 rank 恰好发送一个向量，而 ring 接近两个；"
        "缩放整数求和在各 rank 上完全一致，误差不超过 n/2 个量化单位。",
    ),
    run=run,
    causes=(
        Words(
            "the pool: too few slots make workers wait for the switch",
            "缓冲池：槽位太少会让 worker 等交换机",
        ),
        Words(
            "the scale: one large element costs the small ones their bits",
            "缩放系数：一个特别大的元素会挤掉小元素的有效位",
        ),
    ),
    code=(
        "cairn/comm/schedule/aggregate.py:switch_all_reduce",
        "cairn/comm/schedule/interpret.py:interpret",
    ),
    reading=(
        "Scaling Distributed Machine Learning with In-Network Aggregation (2021)",
        "Scalable Hierarchical Aggregation Protocol (SHArP): A Hardware Architecture for "
        "Efficient Data Reduction (2016)",
    ),
    questions=(
        Question(
            Words(
                "By how much can in-network reduction speed up a large all-reduce?",
                "网内归约最多能让大 all-reduce 快多少？",
            ),
            Words(
                "By 2(n-1)/n, so at most two: each rank still has to send its vector once and receive the sum once, in "
                "both directions at the same time.",
                "2(n-1)/n，最多两倍：每个 rank 仍要发一次自己的向量、收一次结果，收发可同时进行。",
            ),
        ),
        Question(
            Words(
                "Why is the order of packets no problem for SwitchML, but is for floating point?",
                "包到达顺序为什么不影响 SwitchML，却影响浮点求和？",
            ),
            Words(
                "Integer addition is associative, so any order gives the same bits; floating-point sums depend on it.",
                "整数加法满足结合律，任意顺序结果相同；浮点和依赖顺序。",
            ),
        ),
        Question(
            Words("What are NVLS and SHARP?", "NVLS 和 SHARP 是什么？"),
            Words(
                "Reductions inside NVSwitch (multimem instructions, NVLink domain) and inside "
                "InfiniBand switches (trees "
                "over the fabric); NCCL uses both, also together.",
                "NVLS 是在 NVSwitch 里做归约（multimem 指令，NVLink 域内），SHARP 是在 "
                "InfiniBand 交换机里沿树归约；NCCL 可单独或组合使用。",
            ),
        ),
    ),
    seconds=3.0,
)
