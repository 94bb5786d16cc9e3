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
from cairn.labs.lab import Check, Outcome, Plot, Rows, Table, Words, described
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


LAB = described(__file__, run)
