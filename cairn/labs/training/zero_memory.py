"""What does each ZeRO stage take off a rank's memory? Predicted in bytes per parameter, counted on real ranks.

    float32, AdamW     weights 4   gradients 4   states 8   = 16 bytes for each parameter
    dp                 4           4             8
    zero 1             4           4             8 / n
    zero 2             4           4 / n         8 / n
    fsdp (zero 3)      4 / n       4 / n         8 / n

Two ranks make one step in each form and count the bytes they hold, gradients when backward has ended. The result of the
step is the same.
"""

from typing import Any

from cairn.labs.lab import Check, Outcome, Rows, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.ranks import run_ranks
from cairn.labs.training._spread import Setting, alone, difference, spread, tiny, train
from cairn.labs.workbench import Workbench
from cairn.train.parallel.layout import Layout, Strategy

RANKS = 2
FORMS = {
    "dp": (Layout(dp=RANKS), Strategy()),
    "zero 1": (Layout(dp=RANKS), Strategy(zero=1)),
    "zero 2": (Layout(dp=RANKS), Strategy(zero=2)),
    "fsdp": (Layout(fsdp=RANKS), Strategy()),
}
# Shares of weights, gradients and states that a rank keeps, for n ranks.
KEPT = {"dp": (0, 0, 0), "zero 1": (0, 0, 1), "zero 2": (0, 1, 1), "fsdp": (1, 1, 1)}


def held(
    rank: int, count: int, settings: dict[str, Setting]
) -> dict[str, tuple[int, int, int, Any]]:
    """Bytes of weights, gradients and states by form, and the trace of its steps."""
    by_name = {}
    for name, setting in settings.items():
        parallel = spread(setting)
        gradients = _watch_gradients(parallel)
        trace = train(parallel, setting)
        weights = sum(_bytes(p) for stage in parallel.stages for p in stage.parameters())
        by_name[name] = (weights, gradients[0], _states(parallel), trace)
    return by_name


def _watch_gradients(parallel: Any) -> list[int]:
    """Bytes of gradients when backward has ended and before their sums are used; filled while a step runs."""
    from cairn.train.parallel.data import Replicas
    from cairn.train.parallel.zero import Zero

    (sync,) = parallel.syncs
    finish, byte_counts = sync.finish, []

    def spy() -> None:
        if isinstance(sync, Zero):  # on their way whole (stage 1), or this rank's rows (stage 2)
            buffers = [flat for _, flat, _, _ in sync._flying] + list(sync.shards.values())
        elif isinstance(sync, Replicas):  # a bucket that has left is one flat tensor
            buffers = [flat for _, flat, _ in sync._flying] + list(sync.held.found().values())
        else:
            buffers = list(sync.gradients().values())
        byte_counts.append(sum(map(_bytes, buffers)))
        finish()

    sync.finish = spy
    return byte_counts


def _states(parallel: Any) -> int:
    from cairn.train.config import Optim
    from cairn.train.optim.optimizer import make_optimizer

    optimizer = make_optimizer(parallel.parameters(), Optim(), False, 0, lambda tensors: {})
    return sum(_bytes(tensor) for role in optimizer.tensors().values() for tensor in role.values())


def _bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


@one_thread()
def run(bench: Workbench) -> Outcome:
    spec = tiny(hidden=64, intermediate=128, layers=bench.setting("layers", bench.pick(4, 2)))
    settings = {
        name: Setting(spec, layout, strategy, steps=1, per_step=2)
        for name, (layout, strategy) in FORMS.items()
    }
    bench.step("one process")
    expected = alone(settings["dp"])
    bench.step(f"{RANKS} ranks: dp, zero 1, zero 2, fsdp")
    ranks = run_ranks(RANKS, held, settings)
    count = spec.parameters()
    rows, checks = [], []
    for name in FORMS:
        measured = [max(rank[name][part] for rank in ranks) for part in range(3)]
        shares = [1 / RANKS if cut else 1.0 for cut in KEPT[name]]
        predicted = [count * width * share for width, share in zip((4, 4, 8), shares, strict=True)]
        rows.append(
            [name, *[m / count for m in measured], sum(predicted) / count, sum(measured) / count]
        )
        checks.append(
            Check(
                what=Words(f"{name}: bytes for each parameter", f"{name}：每参数字节数"),
                predicted=sum(predicted) / count,
                measured=sum(measured) / count,
                unit="B",
                within=0.03,  # rows that do not divide evenly
            )
        )
    apart = max(difference([rank[name][3] for rank in ranks], expected) for name in FORMS)
    return Outcome(
        checks=[
            *checks,
            Check(
                what=Words("largest difference of any form", "各形式结果的最大差异"),
                predicted=1e-5,
                measured=apart,
                unit="",
                kind="at_most",
            ),
        ],
        table=_table(rows),
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("form", "形式"),
            Words("weights B/parameter", "权重 B/参数"),
            Words("gradients", "梯度"),
            Words("states", "优化器状态"),
            Words("predicted", "预测合计"),
            Words("counted", "实测合计"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
