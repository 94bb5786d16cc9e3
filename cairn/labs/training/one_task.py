"""One task, three ways to share it: what does each of data, tensor and pipeline parallelism send?

    data       gradients of all parameters, once a step            2(n-1)/n x P
    tensor     activations, four all-reduces a layer               (4 x layers + 2) x tokens x hidden
    pipeline   activations of one boundary, there and back         tokens x hidden, and a tied embedding's gradient

Two ranks train the same model on the same batch in each layout, over this project's own backend, and every byte that
enters a link is counted. The losses have to be those of one process.
"""

from typing import Any, NamedTuple

from cairn.labs.comm._counted import counted_bytes
from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.ranks import run_ranks
from cairn.labs.training._spread import Setting, alone, difference, on_ranks, tiny
from cairn.labs.workbench import Workbench
from cairn.models.spec import ModelSpec
from cairn.train.parallel.layout import Layout

RANKS, FLOAT = 2, 4
LAYOUTS = {
    "data": Layout(dp=RANKS),
    "tensor": Layout(tp=RANKS),
    "pipeline": Layout(pp=RANKS),
}


class Sent(NamedTuple):
    bytes: int
    trace: Any


def predicted_bytes(form: str, spec: ModelSpec, tokens: int, microbatches: int) -> float:
    """Of the rank that sends most, in one step of so many microbatches, all ranks together."""
    wide = tokens * spec.hidden * FLOAT
    each_way = 2 * (RANKS - 1) / RANKS  # of an all-reduce, per rank
    match form:
        case "data":
            return each_way * spec.parameters() * FLOAT
        case "tensor":  # and one sum behind the embedding, one in front of the vocabulary
            return each_way * (4 * spec.layers + 2) * wide * microbatches
        case (
            _
        ):  # a tied embedding stands on the first and on the last stage, which sum its gradient
            tied = spec.vocab * spec.hidden * FLOAT if spec.tied else 0
            return wide * microbatches + each_way * tied


def counted(rank: int, count: int, settings: dict[str, Setting]) -> dict[str, Sent]:
    """By layout; joining is not part of a step, so the first byte counts behind the first step."""
    counter = counted_bytes()
    by_name = {}
    for name, setting in settings.items():
        counter[0] = 0
        trace = on_ranks(rank, count, setting)
        by_name[name] = Sent(counter[0] // setting.steps, trace)
    return by_name


@one_thread()
def run(bench: Workbench) -> Outcome:
    spec = tiny(layers=4, hidden=64, intermediate=192, vocab=160)
    usual = Setting(spec, steps=2, per_step=2, tokens=bench.setting("tokens", bench.pick(128, 64)))
    settings = {name: usual._replace(layout=layout) for name, layout in LAYOUTS.items()}
    bench.step("one process")
    expected = alone(usual)
    bench.step(f"{RANKS} ranks: data, tensor, pipeline")
    ranks = run_ranks(RANKS, counted, settings, backend="cairn")
    foreseen = {name: predicted_bytes(name, spec, usual.tokens, usual.per_step) for name in LAYOUTS}
    most = {name: max(rank[name].bytes for rank in ranks) for name in LAYOUTS}
    apart = max(difference([rank[name].trace for rank in ranks], expected) for name in LAYOUTS)
    return Outcome(
        checks=[*(_bytes(name, foreseen[name], most[name]) for name in LAYOUTS), _same(apart)],
        plots=[_plot(spec)],
        table=_table(foreseen, most),
    )


def _bytes(name: str, foreseen: float, sent: float) -> Check:
    chinese = {"data": "数据并行", "tensor": "张量并行", "pipeline": "流水线并行"}[name]
    return Check(
        what=Words(f"{name} parallel: bytes a step", f"{chinese}：每步字节"),
        predicted=foreseen / 1e3,
        measured=sent / 1e3,
        unit="kB",
        within=0.15,  # norms, counts and losses travel, too
    )


def _same(apart: float) -> Check:
    return Check(
        what=Words("largest difference from one process", "与单进程的最大差异"),
        predicted=1e-4,
        measured=apart,
        unit="",
        kind="at_most",
    )


def _plot(spec: ModelSpec) -> Plot:
    tokens = [2**power for power in range(5, 13)]
    return Plot(
        title=Words("Bytes of a step, one microbatch", "每步字节（一个 microbatch）"),
        x=Words("tokens", "token 数"),
        y=Words("kB sent by a rank", "每 rank 发送 kB"),
        lines={
            name: [(float(t), predicted_bytes(name, spec, t, 1) / 1e3) for t in tokens]
            for name in LAYOUTS
        },
        log_x=True,
        log_y=True,
    )


def _table(foreseen: dict[str, float], most: dict[str, int]) -> Table:
    return Table(
        columns=[
            Words("layout", "布局"),
            Words("predicted kB", "预测 kB"),
            Words("counted kB", "实测 kB"),
        ],
        rows=[[name, foreseen[name] / 1e3, most[name] / 1e3] for name in LAYOUTS],
    )


LAB = described(__file__, run)
