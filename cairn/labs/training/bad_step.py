"""What does one bad batch do to a run? Everything, or nothing: it depends on who looks before the update.

    loss NaN or a spike --veto on the device--> weights and states unchanged, the samples are written down

The same tiny run meets a poisoned batch twice: under the trainer's step, and under one that updates whatever comes.
"""

import math
from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
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
        steps=100, out=bench.folder, model=model, optim=Optim(lr=1e-2), device="cpu",
        data=Data(sources=["random"], sequence=32, sequences=2, microbatch=2),
        schedule=Schedule(kind="constant"), checkpoint=Checkpoint(every=0, export=False),
    )  # fmt: skip
    return prepare(config)


def steps(made: Any, count: int, poison: bool, careless: bool) -> tuple[list[float], int]:
    """Losses, and how many weights the poisoned step changed."""
    from cairn.train.data.source import microbatch
    from cairn.train.step import train_step

    state, source, losses, changed = made.state, made.corpus.source, [], 0
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
    count = bench.pick(24, 14)
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


LAB = Lab(
    name="bad-step",
    area="training",
    title=Words("One bad batch", "一个坏 batch"),
    hypothesis=Words(
        "A step whose loss is NaN changes no weight and no state when it is vetoed on the "
        "device, and the run goes on as if "
        "the batch had not been; without the veto every later loss is NaN.",
        "loss 为 NaN 的步若在设备上被否决，则不改变任何权重和状态，训练如同没见过该 batch；若不"
        "否决，此后所有 loss 都是 NaN。",
    ),
    run=run,
    causes=(
        Words(
            "a gradient that is finite although the loss is not, and slips past a check of one of them",
            "loss 非有限但梯度有限，只检查其中之一会漏掉",
        ),
        Words(
            "states were touched before the veto: moments that are NaN poison every later step",
            "否决前状态已被改动：动量变成 NaN 会毒害后续每一步",
        ),
    ),
    code=(
        "cairn/train/bad_step.py:Watch",
        "cairn/train/bad_step.py:veto",
        "cairn/train/step.py:train_step",
    ),
    reading=(
        "PaLM: Scaling Language Modeling with Pathways (2022)",
        "OPT: Open Pre-trained Transformer Language Models (2022)",
    ),
    questions=(
        Question(
            Words(
                "Why veto on the device and not by `if loss.isnan()` in Python?",
                "为什么在设备上否决，而不是在 Python 里 if loss.isnan()？",
            ),
            Words(
                "Reading the loss makes the host wait for the GPU in every step; a factor of "
                "NaN that the update kernel "
                "understands decides without a wait.",
                "在主机读 loss 会让每一步都同步等待 GPU；把 NaN 作为更新核能识别的因子则无需等待。",
            ),
        ),
        Question(
            Words("Skip, rewind or stop?", "跳过、回退还是停止？"),
            Words(
                "Skip a single NaN or spike; rewind a few hundred steps and skip the samples "
                "when losses stay high (PaLM did "
                "so); stop when it repeats, because then it is the run and not the data.",
                "单个 NaN 或尖峰就跳过；loss 持续偏高则回退几百步并跳过那段数据（PaLM 的做法）；"
                "反复出现就停止，因为问题在训练本身而不是数据。",
            ),
        ),
        Question(
            Words("How is a spike told from noise?", "如何区分尖峰与噪声？"),
            Words(
                "By the recent mean and deviation: a limit of mean + k sigma over the last 50 "
                "losses, with a floor for flat "
                "curves; bad losses do not enter the window.",
                "用近期均值和标准差：最近 50 个 loss 的 mean + k sigma，并对平坦曲线设下限；坏 loss 不进入窗口。",
            ),
        ),
    ),
    seconds=4.0,
)
