"""Is a layer cut over ranks the same layer, and what does it have to send? Equal to rounding, four sums a layer.

    columns first, rows second:   x -> [A1 | A2] -> f -> [B1 ; B2] -> sum over ranks

Forward needs one all-reduce after attention and one after the feed-forward, backward the same again: four for each
layer and microbatch, each of tokens x hidden numbers. The trainer's own verbs are counted while two real ranks train.
"""

from typing import Any

from cairn.labs.lab import Check, Outcome, Rows, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.ranks import run_ranks
from cairn.labs.training._spread import Setting, alone, difference, on_ranks, tiny
from cairn.labs.workbench import Workbench
from cairn.train.parallel.layout import Layout, Strategy

RANKS = 2


def counted(rank: int, count: int, settings: dict[str, Setting]) -> dict[str, tuple[Any, int, int]]:
    """By form: the trace, the number of collectives between layers and their bytes as an all-reduce counts them."""
    from cairn.train.parallel import tensor

    by_name = {}
    for name, setting in settings.items():
        calls: list[float] = []
        plain = (tensor.all_reduce, tensor.all_gather, tensor.reduce_scatter)
        tensor.all_reduce = _spy(plain[0], calls, 1.0)
        tensor.all_gather = _spy(plain[1], calls, 0.5 * RANKS)  # half of an all-reduce of all rows
        tensor.reduce_scatter = _spy(plain[2], calls, 0.5)
        trace = on_ranks(rank, count, setting)
        tensor.all_reduce, tensor.all_gather, tensor.reduce_scatter = plain
        wide = setting.tokens * setting.spec.hidden * 4
        layers = [size for size in calls if size in (wide, wide / 2)]
        by_name[name] = (trace, len(layers), int(sum(layers)))
    return by_name


def _spy(call: Any, calls: list[float], weight: float) -> Any:
    def counting(x: Any, group: Any) -> Any:
        calls.append(weight * x.numel() * x.element_size())
        return call(x, group)

    return counting


@one_thread()
def run(bench: Workbench) -> Outcome:
    spec = tiny(layers=bench.size("layers"))
    usual = Setting(spec, Layout(tp=RANKS), steps=1, per_step=2)
    settings = {
        "tp": usual,
        "tp + sequence": usual._replace(strategy=Strategy(sequence_parallel=True)),
    }
    bench.step("one process")
    expected = alone(usual)
    bench.step(f"{RANKS} ranks share every layer, twice")
    ranks = run_ranks(RANKS, counted, settings)
    wide = usual.tokens * spec.hidden * 4
    # Two in forward and two in backward for each layer, and the lookup and the head at the ends.
    predicted = 4 * spec.layers * usual.per_step * wide
    rows: list[tuple[str, int, int, float, float]] = []
    for name in settings:
        _, number, moved = ranks[0][name]
        apart = difference([rank[name][0] for rank in ranks], expected)
        rows.append((name, number, moved, moved / wide / usual.per_step / spec.layers, apart))
    ends = 2 * usual.per_step * wide  # of the embedding (forward) and of the head (backward)
    return Outcome(
        checks=[
            *[
                Check(
                    what=Words(f"{row[0]}: difference to one process", f"{row[0]}：与单进程的差异"),
                    predicted=1e-5,
                    measured=row[4],
                    unit="",
                    kind="at_most",
                )
                for row in rows
            ],
            *[
                Check(
                    what=Words(f"{row[0]}: bytes between the layers", f"{row[0]}：层间通信字节"),
                    predicted=predicted + ends,
                    measured=row[2],
                    unit="B",
                    within=0.02,
                )
                for row in rows
            ],
        ],
        table=_table(rows),
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("form", "形式"),
            Words("collectives", "集合通信次数"),
            Words("bytes as all-reduce", "折算 all-reduce 字节"),
            Words("per layer and microbatch", "每层每 microbatch 次数"),
            Words("difference", "差异"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
