"""What does one bad batch do to a run? Everything, or nothing: it depends on who looks before the update.

    loss NaN or a spike --veto on the device--> weights and states unchanged, the samples are written down

The same tiny run meets a poisoned batch twice: under the trainer's step, and under one that updates whatever comes.
"""

import math
from typing import Any

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

POISONED = 8  # the step that meets it


def prepared(bench: Workbench) -> Any:
    from cairn.train.config import Checkpoint, Data, Model, Optim, Schedule, Train
    from cairn.train.prepare import prepare

    model = Model(
        preset="tiny-qwen3", layers=2, hidden=32, heads=2, kv_heads=1, intermediate=48, vocab=64
    )
    config = Train(
        steps=100,
        out=bench.folder,
        model=model,
        optim=Optim(lr=1e-2),
        device="cpu",
        data=Data(sources=["random"], sequence=32, sequences=2, microbatch=2),
        schedule=Schedule(kind="constant"),
        checkpoint=Checkpoint(every=0, export=False),
    )
    return prepare(config)


def steps(trainer: Any, count: int, poison: bool, careless: bool) -> tuple[list[float], int]:
    """Losses, and how many weights the poisoned step changed."""
    from cairn.train.data.source import microbatch
    from cairn.train.step import train_step

    state, source, losses, changed = trainer.state, trainer.corpus.source, [], 0
    if careless:
        state.optimizer = _Careless(state.optimizer)
    plain = state.loss
    for number in range(count):
        bad = poison and number == POISONED
        state.loss = (lambda *args: plain(*args) * math.nan) if bad else plain
        before = [p.detach().clone() for p in state.parallel.parameters().values()]
        result = train_step(state, [microbatch(source, range(2))])  # learnt by heart: losses fall
        if bad:
            after = state.parallel.parameters().values()
            changed = sum(int((old != new).sum()) for old, new in zip(before, after, strict=True))
        losses.append(float(result.loss))
        state.watch.judge(losses[-1], float(result.norm), result.limit)
    state.loss = plain
    return losses, changed


class _Careless:
    """An optimizer that never hears of a veto."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def update(self, gradients: Any, number: int, lr: float, factor: Any) -> None:
        import torch

        self.inner.update(gradients, number, lr, torch.ones_like(factor))

    def tensors(self) -> Any:
        return self.inner.tensors()


@one_thread()
def run(bench: Workbench) -> Outcome:
    count = bench.size("steps")
    bench.step("a run without the poisoned batch")
    clean, _ = steps(prepared(bench), count, poison=False, careless=False)
    bench.step("the same batch under the trainer's step")
    guarded, changed = steps(prepared(bench), count, poison=True, careless=False)
    bench.step("and under one that updates whatever comes")
    careless, spoilt = steps(prepared(bench), count, poison=True, careless=True)
    alive = sum(math.isfinite(loss) for loss in guarded)
    dead = sum(not math.isfinite(loss) for loss in careless[POISONED + 1 :])
    lag = abs(guarded[-1] - clean[-2])  # one update fewer
    return Outcome(
        checks=_checks(changed, count, alive, dead, lag),
        plots=[
            Plot(
                title=Words("A poisoned batch at step 8", "第 8 步遇到坏 batch"),
                x=Words("step", "步"),
                y=Words("loss", "loss"),
                lines={
                    "clean": [(float(i), y) for i, y in enumerate(clean)],
                    "guarded": [(float(i), y) for i, y in enumerate(guarded) if math.isfinite(y)],
                    "careless": [(float(i), y) for i, y in enumerate(careless) if math.isfinite(y)],
                },
            )
        ],
        table=Table(
            columns=[
                Words("run", "运行"),
                Words("weights changed", "改变的权重"),
                Words("NaN steps", "NaN 步数"),
                Words("last loss", "最后 loss"),
            ],
            rows=[
                ["guarded", changed, count - alive, guarded[-1]],
                ["careless", spoilt, dead + 1, str(careless[-1])],
            ],
        ),
    )


def _checks(changed: int, count: int, alive: int, dead: int, lag: float) -> list[Check]:
    return [
        Check(
            what=Words("weights that the vetoed step changed", "被否决的步改变的权重数"),
            predicted=0,
            measured=changed,
            unit="weights",
        ),
        Check(
            what=Words("finite losses, of all but the poisoned one", "除中毒步外有限的 loss 数"),
            predicted=count - 1,
            measured=alive,
            unit="steps",
        ),
        Check(
            what=Words("careless: later steps that are NaN", "不设防：之后变成 NaN 的步数"),
            predicted=count - 1 - POISONED,
            measured=dead,
            unit="steps",
        ),
        Check(
            what=Words(
                "last loss against a clean run one step shorter",
                "与少走一步的干净训练的 loss 差",
            ),
            predicted=0.05,
            measured=lag,
            unit="loss",
            kind="at_most",
        ),
    ]


LAB = described(__file__, run)
