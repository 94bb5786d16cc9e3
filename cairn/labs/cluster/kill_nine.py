"""kill -9 in the middle of training: what is lost, and is what comes after the same as if nothing had happened?

    steps   1 2 3 4 [5] 6 7 8 9 [10] 11 12 13 X        [n] checkpoint, X killed
    again                        10  11 12 13 14 ...   from the newest checkpoint that is complete

A real process is killed without a chance to say anything, and once more while a checkpoint is half written.
"""

from pathlib import Path
from typing import NamedTuple

from cairn.labs.cluster._trainee import PATIENCE_S, kill_at, resume, start, step_of, train
from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench

EVERY = 5


class Life(NamedTuple):
    """One stretch of the run, up to its death."""

    died: int  # after this step
    came_back: int  # at this one
    status: int | None  # of the process

    @property
    def lost(self) -> int:
        return self.died - self.came_back


def run(bench: Workbench) -> Outcome:
    import torch

    steps, kills = bench.pick((40, (13, 27)), (20, (8,)))
    broken, calm = bench.folder / "broken", bench.folder / "calm"
    lives = killed_again_and_again(bench, broken, steps, kills)
    last = resume(broken, [])
    bench.step("the same run, left alone")
    before = torch.get_num_threads()
    reference = train(calm, steps, EVERY)
    torch.set_num_threads(before)
    differ = (last.weight != reference.weight).sum() + (last.momentum != reference.momentum).sum()
    return Outcome(
        checks=_checks(lives, steps, last.step, int(differ)),
        table=_table(lives),
        notes=[
            Words(
                f"Loss at the end {last.loss():.4f}, of the run left alone {reference.loss():.4f}. A half-written "
                "checkpoint (no COMPLETE) lay in the folder and was passed over.",
                f"最终损失 {last.loss():.4f}，未中断运行 {reference.loss():.4f}。目录里有一个写了一半的 "
                "checkpoint（没有 COMPLETE），被跳过。",
            )
        ],
    )


def killed_again_and_again(
    bench: Workbench, root: Path, steps: int, kills: tuple[int, ...]
) -> list[Life]:
    """Ends the run after each of these steps, lets it come back, and at last lets it reach its end."""
    died, exits, came_back = [], [], []
    for kill in kills:
        bench.step(f"a run that is killed after step {kill}")
        process = start(root, steps, EVERY, 0.02)
        died.append(kill_at(root, process, kill))
        exits.append(process.exitcode)
        came_back.append(step_of(root, "resumed"))
        half = root / f"step-{(died[-1] // EVERY + 1) * EVERY:08d}"
        half.mkdir(exist_ok=True)  # a checkpoint that was being written when the machine went down
        (half / "__0_0.distcp").write_bytes(b"half of it")
    bench.step("again, to the end")
    start(root, steps, EVERY, 0.0).join(PATIENCE_S)
    came_back = [*came_back[1:], step_of(root, "resumed")]  # where it came back after each kill
    return [Life(*one) for one in zip(died, came_back, exits, strict=True)]


def _checks(lives: list[Life], steps: int, done: int, differ: int) -> list[Check]:
    return [
        Check(
            what=Words("step at which it came back after the first kill", "第一次被杀后恢复到的步"),
            predicted=lives[0].died // EVERY * EVERY,
            measured=lives[0].came_back,
            unit="step",
        ),
        Check(
            what=Words("steps lost, at most", "最多丢失的步数"),
            predicted=EVERY,
            measured=max(life.lost for life in lives),
            unit="steps",
            kind="at_most",
        ),
        Check(
            what=Words("steps done at the end", "最终完成的步数"),
            predicted=steps,
            measured=done,
            unit="steps",
        ),
        Check(
            what=Words(
                "numbers of the state that differ from a run left alone",
                "与未中断运行不同的状态数值个数",
            ),
            predicted=0,
            measured=differ,
            unit="numbers",
        ),
    ]


def _table(lives: list[Life]) -> Table:
    return Table(
        columns=[
            Words("killed after step", "被杀时的步"),
            Words("came back at", "恢复到"),
            Words("steps lost", "丢失步数"),
            Words("exit status", "退出状态"),
        ],
        rows=[[life.died, life.came_back, life.lost, str(life.status)] for life in lives],
    )


LAB = described(__file__, run)
