"""Can a run go on in another layout, as if nothing had happened? Losses of one run, cut into three lives.

    steps 0-1   dp 2     checkpoint     steps 2-3   tp 2     checkpoint     steps 4-5   one process

A checkpoint names global tensors, not ranks, and the state of the data is one number. So every life reads what the one
before wrote, and the losses must be those of a single process that was never stopped.
"""

from pathlib import Path
from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
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
        steps=steps, out=folder, model=model, optim=Optim(lr=1e-2), parallel=layout,
        data=Data(sources=["random"], sequence=32, sequences=4, microbatch=2),
        checkpoint=Checkpoint(every=STEPS, keep=3, export=False), log=Log(every=1), device="cpu",
        schedule=Schedule(kind="constant"),
    )  # fmt: skip


def live(rank: int, count: int, folder: str, steps: int, layout: Layout) -> list[float]:
    """One life of the run on this rank: from the newest checkpoint up to `steps`; its losses."""
    from cairn.train.loop import Loop
    from cairn.train.prepare import prepare

    config = recipe(Path(folder), steps, layout)
    prepared = prepare(config)
    config.folder.mkdir(parents=True, exist_ok=True)
    losses: list[float] = []
    loop = Loop(
        prepared.state, prepared.corpus.source, count, rank,
        say=lambda text: None, told=lambda record: losses.append(record.loss or 0.0),
    )  # fmt: skip
    loop.run()
    return losses


@one_thread()
def run(bench: Workbench) -> Outcome:
    lives = bench.pick(LIVES, LIVES[1:])
    total = STEPS * len(lives)
    bench.step(f"one process, {total} steps, never stopped")
    expected = live(0, 1, str(bench.folder / "whole"), total, Layout())
    found: list[float] = []
    where: list[str] = []
    for number, layout in enumerate(lives, start=1):
        bench.step(f"life {number}: {layout.words()}")
        folder, steps = str(bench.folder / "lives"), STEPS * number
        if layout.world() == 1:
            losses = live(0, 1, folder, steps, layout)
        else:
            losses = run_ranks(layout.world(), live, folder, steps, layout)[0]
        found += losses
        where += [layout.words()] * len(losses)
    apart = [abs(one - other) for one, other in zip(found, expected, strict=False)]
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
                measured=len(found),
                unit="steps",
            ),
        ],
        plots=[_plot(expected, found)],
        table=Table(
            columns=[
                Words("step", "步"),
                Words("layout", "布局"),
                Words("loss", "loss"),
                Words("one process", "单进程"),
            ],
            rows=[
                [step, where[step], found[step], expected[step]]
                for step in range(min(len(found), len(expected)))
            ],
        ),
    )


def _plot(expected: list[float], found: list[float]) -> Plot:
    return Plot(
        title=Words("Loss over three lives", "三次重启的 loss"),
        x=Words("step", "步"),
        y=Words("loss", "loss"),
        lines={
            "never stopped": list(enumerate(expected)),
            "restarted": list(enumerate(found)),
        },
    )


LAB = Lab(
    name="restart-layout",
    area="training",
    title=Words("Restart on another layout", "换一种布局重启"),
    hypothesis=Words(
        "A run that is data parallel, then tensor parallel, then one process, with a "
        "checkpoint between, has the losses of "
        "one process that was never stopped, within 1e-5.",
        "先数据并行、再张量并行、最后单进程，中间靠检查点衔接，loss 与从未中断的单进程相差不超过 1e-5。",
    ),
    run=run,
    causes=(
        Words(
            "sums in another order on another layout, which grow from step to step",
            "不同布局加法顺序不同，误差逐步放大",
        ),
        Words(
            "something that a checkpoint forgot: random numbers, the data's position, the schedule",
            "检查点漏了某项状态：随机数、数据位置、学习率进度",
        ),
    ),
    code=(
        "cairn/train/checkpoint/piece.py:Piece",
        "cairn/train/checkpoint/planner.py",
        "cairn/train/checkpoint/load.py:load_pieces",
        "cairn/train/state.py:TrainState",
    ),
    reading=(
        "ByteCheckpoint: A Unified Checkpointing System for Large Foundation Model Development (2025)",
        "Universal Checkpointing: Efficient and Flexible Checkpointing for Large Scale Distributed Training (2024)",
    ),
    questions=(
        Question(
            Words("What must a checkpoint hold besides weights?", "除权重外检查点还必须包含什么？"),
            Words(
                "Optimizer states and masters, the step (learning rate), the position in the "
                "data, the loss scaler, random "
                "number states and what is known about bad steps.",
                "优化器状态与主权重、步数（学习率）、数据位置、loss scaler、随机数状态，以及坏步统计。",
            ),
        ),
        Question(
            Words(
                "Why does the data's state fit into one integer here?",
                "为什么这里数据状态只要一个整数？",
            ),
            Words(
                "A sample is a pure function of its number, whatever the ranks: the number of "
                "samples consumed is all that "
                "a restart needs, and no sample is seen twice or missed.",
                "样本是其编号的纯函数，与 rank 数无关；重启只需已消费样本数，不会重复也不会遗漏。",
            ),
        ),
        Question(
            Words(
                "How does a rank read a slice that no rank had written?",
                "某个 rank 要读的切片此前没有任何 rank 恰好写过，怎么办？",
            ),
            Words(
                "Files say which box of the global tensor each piece is; a planner intersects "
                "the wanted box with all of "
                "them and reads only the overlaps.",
                "文件记录每块在全局张量中的位置；加载时把所需区域与所有块求交，只读重叠部分。",
            ),
        ),
    ),
    needs=("2 processes",),
    seconds=9.0,
)
