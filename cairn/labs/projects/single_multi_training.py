"""The whole trainer on one process and on two: the same losses, sooner. How much sooner is predicted.

    one    ████████ forward, backward     ░ update
    two    ████ | ████                    ▒▒ all-reduce of the gradients   ░ update

    speed-up = t1 / (t1 / 2 + all-reduce)      the same batch, half of it on each

The all-reduce comes from our cost model with the loopback's measured latency and bandwidth. Losses are compared number
by number: two processes are one larger machine, not another training.
"""

import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cairn.comm.cost import LinkCost, choose
from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

SAME = 1e-4  # float32, sums in another order


class Step(NamedTuple):
    loss: float
    seconds: float
    cpu_s: float  # of this rank


def run(bench: Workbench) -> Outcome:
    steps = bench.setting("steps", bench.pick(8, 4))
    by_ranks = {}
    for count in (1, 2):
        bench.step(f"{count} process(es)")
        folder = str(bench.folder / str(count))
        by_ranks[count] = run_ranks(count, train, folder, steps, timeout_s=90)[0]
    (one, size), (two, _) = by_ranks[1], by_ranks[2]
    reduce_s = choose("all_reduce", 2, size, link_of(bench))[0].us / 1e6
    return Outcome(
        checks=[_same(one, two), *_sooner(pace_of(one), pace_of(two), reduce_s)],
        plots=[
            Plot(
                title=Words("The same training, sooner", "同一个训练过程，更快"),
                x=Words("step", "步"),
                y=Words("ms per step", "每步毫秒"),
                lines={
                    "one process": [(step, row.seconds * 1e3) for step, row in enumerate(one, 1)],
                    "two processes": [(step, row.seconds * 1e3) for step, row in enumerate(two, 1)],
                },
            )
        ],
        table=_table(one, two, reduce_s),
    )


def pace_of(rows: list[Step]) -> Step:
    """Medians of all steps but the first, which allocates."""
    return Step(*(median(part) for part in zip(*rows[1:], strict=True)))


def _same(one: list[Step], two: list[Step]) -> Check:
    return Check(
        what=Words("largest difference of a loss", "loss 的最大差异"),
        predicted=SAME,
        measured=max(abs(a.loss - b.loss) for a, b in zip(one, two, strict=True)),
        unit="",
        kind="at_most",
    )


def _sooner(one: Step, two: Step, reduce_s: float) -> list[Check]:
    return [
        Check(
            what=Words(
                "CPU time of a rank's step, two over one", "每 rank 每步 CPU 时间：双进程比单进程"
            ),
            predicted=0.5,
            measured=two.cpu_s / one.cpu_s,
            unit="x",
            within=0.4,
        ),
        Check(
            what=Words("speed-up of two processes", "双进程加速比"),
            predicted=one.seconds / (one.seconds / 2 + reduce_s),
            measured=one.seconds / two.seconds,
            unit="x",
            within=0.4,  # slower than one process is as wrong as faster than the model
        ),
    ]


def _table(one: list[Step], two: list[Step], reduce_s: float) -> Table:
    return Table(
        columns=[
            Words("processes", "进程数"),
            Words("ms per step", "每步毫秒"),
            Words("CPU ms per step", "每步 CPU 毫秒"),
            Words("last loss", "最后 loss"),
            Words("all-reduce, predicted ms", "预测 all-reduce 毫秒"),
        ],
        rows=[
            [
                count,
                pace_of(rows).seconds * 1e3,
                pace_of(rows).cpu_s * 1e3,
                rows[-1].loss,
                sent * 1e3,
            ]
            for count, rows, sent in ((1, one, 0.0), (2, two, reduce_s))
        ],
    )


def link_of(bench: Workbench) -> LinkCost:
    """The network between two processes of this machine, as calibrated."""
    trip, rate = bench.ceilings.loopback_round_trip, bench.ceilings.loopback_throughput
    return LinkCost(
        alpha_us=trip.value / 2 * 1e6 if trip else 20.0,
        gb_per_s=rate.value / 1e9 if rate else 1.0,
    )


def train(rank: int, count: int, folder: str, steps: int) -> tuple[list[Step], int]:
    """Every step, and the bytes of all gradients."""
    from cairn.train.loop import Loop
    from cairn.train.metrics_log import Record
    from cairn.train.prepare import prepare

    prepared = prepare(recipe(Path(folder), count, steps))
    Path(folder).mkdir(parents=True, exist_ok=True)
    rows: list[Step] = []
    spent = time.process_time()

    def on_record(record: Record) -> None:
        nonlocal spent
        now = time.process_time()
        rows.append(Step(record.loss or float("nan"), record.seconds, now - spent))
        spent = now

    Loop(prepared.state, prepared.corpus.source, count, rank, lambda text: None, on_record).run()
    size = sum(4 * part.numel() for part in prepared.state.parallel.parameters().values())
    return rows, size


def recipe(folder: Path, processes: int, steps: int) -> Any:
    """A small model over random tokens; the batch of a step is the same however many share it."""
    from cairn.train.config import Checkpoint, Data, Log, Model, Optim, Train
    from cairn.train.parallel.layout import Layout

    return Train(
        steps=steps,
        out=folder,
        model=Model(
            preset="tiny-qwen3",
            layers=4,
            hidden=128,
            heads=4,
            kv_heads=2,
            intermediate=256,
            vocab=512,
        ),
        optim=Optim(lr=3e-3),
        data=Data(sources=["random"], sequence=64, sequences=8, microbatch=4),
        checkpoint=Checkpoint(every=0, export=False),
        log=Log(every=1),
        parallel=Layout(dp=processes),
        device="cpu",
    )


LAB = described(__file__, run)
