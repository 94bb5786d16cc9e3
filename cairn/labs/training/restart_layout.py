"""Can a run go on in another layout, as if nothing had happened? Losses of one run, cut into three lives.

    steps 0-1   dp 2     checkpoint     steps 2-3   tp 2     checkpoint     steps 4-5   one process

A checkpoint names global tensors, not ranks, and the state of the data is one number. So every life reads what the one
before wrote, and the losses must be those of a single process that was never stopped.
"""

from pathlib import Path
from typing import Any

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench
from cairn.train.parallel.layout import Layout

LIVES = (Layout(dp=2), Layout(tp=2), Layout())
STEPS = 2  # of each life


def recipe(folder: Path, steps: int, layout: Layout) -> Any:
    from cairn.train.config import Checkpoint, Data, Log, Model, Optim, Schedule, Train

    model = Model(
        preset="tiny-qwen3", layers=2, hidden=32, heads=2, kv_heads=2, intermediate=48, vocab=64
    )
    return Train(
        steps=steps,
        out=folder,
        model=model,
        optim=Optim(lr=1e-2),
        parallel=layout,
        data=Data(sources=["random"], sequence=32, sequences=4, microbatch=2),
        checkpoint=Checkpoint(every=STEPS, keep=3, export=False),
        log=Log(every=1),
        device="cpu",
        schedule=Schedule(kind="constant"),
    )


def live(rank: int, count: int, folder: str, steps: int, layout: Layout) -> list[float]:
    """One life of the run on this rank: from the newest checkpoint up to `steps`; its losses."""
    from cairn.train.loop import Loop
    from cairn.train.prepare import prepare

    config = recipe(Path(folder), steps, layout)
    prepared = prepare(config)
    config.folder.mkdir(parents=True, exist_ok=True)
    losses: list[float] = []
    loop = Loop(
        prepared.state,
        prepared.corpus.source,
        count,
        rank,
        log_line=lambda text: None,
        on_record=lambda record: losses.append(record.loss or 0.0),
    )
    loop.run()
    return losses


@one_thread()
def run(bench: Workbench) -> Outcome:
    lives = LIVES[-bench.size("lives") :]
    total = STEPS * len(lives)
    bench.step(f"one process, {total} steps, never stopped")
    expected = live(0, 1, str(bench.folder / "whole"), total, Layout())
    resumed: list[float] = []
    where: list[str] = []
    for number, layout in enumerate(lives, start=1):
        bench.step(f"life {number}: {layout.words()}")
        folder, steps = str(bench.folder / "lives"), STEPS * number
        if layout.world() == 1:
            losses = live(0, 1, folder, steps, layout)
        else:
            losses = run_ranks(layout.world(), live, folder, steps, layout)[0]
        resumed += losses
        where += [layout.words()] * len(losses)
    apart = [abs(one - other) for one, other in zip(resumed, expected, strict=False)]
    return Outcome(
        checks=[
            Check(
                what=Words("largest difference of any loss", "loss 的最大差异"),
                predicted=1e-5,
                measured=max(apart),
                unit="",
                kind="at_most",
            ),
            Check(
                what=Words("steps that were done", "完成的步数"),
                predicted=len(expected),
                measured=len(resumed),
                unit="steps",
            ),
        ],
        plots=[_plot(expected, resumed)],
        table=Table(
            columns=[
                Words("step", "步"),
                Words("layout", "布局"),
                Words("loss", "loss"),
                Words("one process", "单进程"),
            ],
            rows=[
                [step, where[step], resumed[step], expected[step]]
                for step in range(min(len(resumed), len(expected)))
            ],
        ),
    )


def _plot(expected: list[float], resumed: list[float]) -> Plot:
    return Plot(
        title=Words("Loss over three lives", "三次重启的 loss"),
        x=Words("step", "步"),
        y=Words("loss", "loss"),
        lines={
            "never stopped": list(enumerate(expected)),
            "restarted": list(enumerate(resumed)),
        },
    )


LAB = described(__file__, run)
