"""How long does a checkpoint stop the training? As long as a copy in memory, if the disk is left to another thread.

    synchronous     copy + write + fsync            the step waits for the disk
    background      copy                            the disk works beside the next steps

The trainer's own saver writes the same state both ways; the time until `save` returns is what training loses.
"""

import time
from collections.abc import Sequence

from cairn.core.errors import CairnError
from cairn.labs.lab import Check, Outcome, Rows, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.train.checkpoint import folder as folders
    from cairn.train.checkpoint.piece import whole
    from cairn.train.checkpoint.save import Saver

    count = bench.setting("n", bench.pick(4 << 20, 1 << 20))
    state = {f"part.{n}": whole(torch.randn(count)) for n in range(3)}
    total = sum(piece.tensor.nbytes for piece in state.values())
    stalls: dict[str, list[float]] = {"synchronous": [], "background": []}
    stalls_of: dict[str, list[float]] = {"synchronous": [], "background": []}
    savers = {
        name: Saver(bench.folder / name, keep=1, in_background=name == "background")
        for name in stalls
    }
    for step in range(bench.pick(4, 3)):
        for name, saver in savers.items():
            bench.step(f"{name} save number {step}")
            began = time.perf_counter()
            saver.save(step, state, {"step": step})
            stalls[name].append(time.perf_counter() - began)
            saver.wait()
            stalls_of[name].append(time.perf_counter() - began)
    problems = [saver.problem() for saver in savers.values()]
    complete = sum(folders.newest(bench.folder / name, []) is not None for name in savers)
    best = {name: min(times[1:]) for name, times in stalls.items()}  # the first one allocates
    copy, disk = bench.ceilings.host_copy or bench.ceilings.copy, bench.ceilings.disk_write
    rows = [
        [name, total / 1e6, best[name] * 1e3, min(stalls_of[name][1:]) * 1e3] for name in stalls
    ]
    notes = []
    if copy is not None and disk is not None:
        memory_s, disk_s = 2 * total / copy.value, total / disk.value
        notes.append(
            Words(
                f"by this machine's ceilings a copy takes {memory_s * 1e3:.0f} ms and the disk {disk_s * 1e3:.0f} ms",
                f"按本机上限，内存拷贝约 {memory_s * 1e3:.0f} ms，磁盘写约 {disk_s * 1e3:.0f} ms",
            )
        )
    return Outcome(
        checks=_checks(best, complete, problems),
        table=_table(rows),
        notes=notes,
    )


def _checks(
    best: dict[str, float], complete: int, problems: Sequence[CairnError | None]
) -> list[Check]:
    return [
        Check(
            what=Words(
                "stall in the background, of the synchronous one",
                "后台保存与同步保存的停顿之比",
            ),
            predicted=0.35,
            measured=best["background"] / best["synchronous"],
            unit="x",
            kind="at_most",
        ),
        Check(
            what=Words("checkpoints that are complete", "完整的检查点数"),
            predicted=2,
            measured=complete,
            unit="checkpoints",
        ),
        Check(
            what=Words("saves that failed", "失败的保存"),
            predicted=0,
            measured=sum(problem is not None for problem in problems),
            unit="saves",
        ),
    ]


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("way", "方式"),
            Words("MB", "MB"),
            Words("training stands still, ms", "训练停顿 ms"),
            Words("on disk after, ms", "落盘 ms"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
