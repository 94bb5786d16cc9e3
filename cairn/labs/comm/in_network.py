"""What if the switch did the sum? Real ranks, one of which plays the switch, and every byte on every link counted.

    ring        each of n ranks sends 2(n-1)/n vectors
    switch      each worker sends 1 vector and receives 1, whatever their number; the switch carries n of them

A switch has no floating point, so numbers are scaled to integers first (SwitchML): the error is bounded before
anything is sent. The ranks are those of this project's backend, which executes the very schedules that
`cairn comm verify` proves; what a rank sends is counted where messages enter a link.
"""

from typing import Any, NamedTuple

from cairn.labs.comm._counted import counted_bytes
from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

BITS = 31  # of an integer with a sign
WORKERS = 3  # and one rank that plays the switch
CHUNK_BYTES = 16 << 10


class Sent(NamedTuple):
    """By one rank in one operation."""

    vectors: float  # bytes sent over bytes of the vector
    sums: Any  # what it has at the end


class RankResult(NamedTuple):
    ring: Sent
    switch: Sent


def scale_for(largest: float, ranks: int) -> float:
    """Integers as large as can be while the sum of all ranks still fits."""
    return (2**BITS - 1) / (largest * ranks) / 2


def values_of(rank: int, numbers: int) -> Any:
    import numpy as np

    return np.random.default_rng(rank).standard_normal(numbers)


def reduced(rank: int, count: int, numbers: int, scale: float) -> RankResult:
    """The same sum as a ring over the workers, and through the last rank."""
    import torch
    import torch.distributed as dist

    from cairn.labs.torch_backend import Options

    workers, aggregator = list(range(count - 1)), count - 1
    counter = counted_bytes()
    ring = dist.new_group(workers, backend="cairn", pg_options=Options(schedule="ring"))
    whole = torch.from_numpy((values_of(rank, numbers) * scale).round()).to(torch.int32)
    by_ring, by_switch = whole.clone(), whole.clone()
    counter[0] = 0
    if rank != aggregator:
        dist.all_reduce(by_ring, group=ring)
    ring_bytes, counter[0] = counter[0], 0
    group: Any = dist.group.WORLD
    group.switch_all_reduce(by_switch, aggregator, CHUNK_BYTES).wait()
    return RankResult(
        Sent(ring_bytes / whole.nbytes, by_ring), Sent(counter[0] / whole.nbytes, by_switch)
    )


def run(bench: Workbench) -> Outcome:
    import numpy as np

    numbers = bench.setting("n", bench.pick(300_000, 60_000))
    vectors = [values_of(rank, numbers) for rank in range(WORKERS)]
    scale = scale_for(max(float(np.abs(v).max()) for v in vectors), WORKERS)
    bench.step(f"{WORKERS} workers: a ring, then one rank as the switch")
    by_rank = run_ranks(WORKERS + 1, reduced, numbers, scale, backend="cairn")
    error = float(
        np.abs(by_rank[0].switch.sums.double().numpy() / scale - np.sum(vectors, axis=0)).max()
    )
    apart = sum(bool((one.switch.sums != by_rank[0].ring.sums).any()) for one in by_rank[:WORKERS])
    return Outcome(
        checks=[*_bytes(by_rank), *_sums(error, WORKERS * 0.5 / scale, apart)],
        plots=[_plot()],
        table=_table(by_rank),
    )


def ring_vectors(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _bytes(by_rank: list[RankResult]) -> list[Check]:
    """A slot has one size, so that the last chunk is filled up: a few percent at most."""
    workers, switch = by_rank[:WORKERS], by_rank[WORKERS]
    return [
        Check(
            what=Words("vectors that a worker sends to the switch", "worker 发给交换机的向量数"),
            predicted=1.0,
            measured=max(one.switch.vectors for one in workers),
            unit="vectors",
            within=0.08,
        ),
        Check(
            what=Words("vectors that a rank of the ring sends", "ring 中每个 rank 发送的向量数"),
            predicted=ring_vectors(WORKERS),
            measured=max(one.ring.vectors for one in workers),
            unit="vectors",
            within=0.02,
        ),
        Check(
            what=Words("vectors that the switch sends", "交换机发出的向量数"),
            predicted=WORKERS,
            measured=switch.switch.vectors,
            unit="vectors",
            within=0.08,
        ),
    ]


def _sums(error: float, bound: float, apart: int) -> list[Check]:
    return [
        Check(
            what=Words("largest error of the integer sum", "整数求和的最大误差"),
            predicted=bound,
            measured=error,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words(
                "workers whose bits differ from the ring's", "结果比特与 ring 不同的 worker 数"
            ),
            predicted=0,
            measured=apart,
            unit="workers",
        ),
    ]


def _plot() -> Plot:
    sizes = [2**power for power in range(1, 11)]
    return Plot(
        title=Words("Vectors that a rank sends", "每个 rank 发送的向量数"),
        x=Words("ranks", "rank 数"),
        y=Words("vectors", "向量数"),
        lines={
            "ring": [(float(n), ring_vectors(n)) for n in sizes],
            "switch": [(float(n), 1.0) for n in sizes],
        },
        log_x=True,
        limit=("one vector", 1.0),
    )


def _table(by_rank: list[RankResult]) -> Table:
    return Table(
        columns=[
            Words("rank", "rank"),
            Words("ring, vectors sent", "ring 发送向量数"),
            Words("switch, vectors sent", "交换机方案发送向量数"),
        ],
        rows=[[rank, one.ring.vectors, one.switch.vectors] for rank, one in enumerate(by_rank)],
    )


LAB = described(__file__, run)
