"""How long does a checkpoint stop the training? As long as a copy in memory, if the disk is left to another thread.

    synchronous     copy + write + fsync            the step waits for the disk
    background      copy                            the disk works beside the next steps

The trainer's own saver writes the same state both ways; the time until `save` returns is what training loses.
"""

import time
from collections.abc import Sequence

from cairn.core.errors import CairnError
from cairn.labs.lab import Check, Lab, Outcome, Question, Rows, Table, Words
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.train.checkpoint import folder as folders
    from cairn.train.checkpoint.piece import whole
    from cairn.train.checkpoint.save import Saver

    count = bench.pick(4 << 20, 1 << 20)
    state = {f"part.{n}": whole(torch.randn(count)) for n in range(3)}
    total = sum(piece.tensor.nbytes for piece in state.values())
    stalls: dict[str, list[float]] = {"synchronous": [], "background": []}
    done: dict[str, list[float]] = {"synchronous": [], "background": []}
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
            done[name].append(time.perf_counter() - began)
    problems = [saver.problem() for saver in savers.values()]
    complete = sum(folders.newest(bench.folder / name, []) is not None for name in savers)
    best = {name: min(times[1:]) for name, times in stalls.items()}  # the first one allocates
    copy, disk = bench.ceilings.host_copy or bench.ceilings.copy, bench.ceilings.disk_write
    rows = [[name, total / 1e6, best[name] * 1e3, min(done[name][1:]) * 1e3] for name in stalls]
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


LAB = Lab(
    name="checkpoint-stall",
    area="training",
    title=Words("What a checkpoint costs the step", "检查点让训练停多久"),
    hypothesis=Words(
        "A save in the background stops training for one copy in memory, at most a third of "
        "what a synchronous save takes, "
        "and the checkpoint is as complete.",
        "后台保存只让训练停下一次内存拷贝的时间，不超过同步保存的三分之一，而检查点同样完整。",
    ),
    run=run,
    causes=(
        Words(
            "the page cache took the write, so the disk's time did not show",
            "写入被 page cache 吸收，磁盘时间没有体现",
        ),
        Words(
            "fresh memory for the copy has to be faulted in; later saves reuse it",
            "首次拷贝要触发缺页；之后的保存会复用这块内存",
        ),
    ),
    code=(
        "cairn/train/checkpoint/save.py:Saver",
        "cairn/train/checkpoint/folder.py:mark_complete",
        "cairn/core/checkpoint_interval.py",
    ),
    reading=(
        "CheckFreq: Frequent, Fine-Grained DNN Checkpointing (2021)",
        "ByteCheckpoint: A Unified Checkpointing System for Large Foundation Model Development (2025)",
    ),
    questions=(
        Question(
            Words(
                "Why copy first and not let the thread read the weights?",
                "为什么要先拷贝，而不是让后台线程直接读权重？",
            ),
            Words(
                "The optimizer changes them in the next step; a thread that reads meanwhile "
                "would write a mixture of two "
                "steps, which no restart can use.",
                "下一步优化器就会修改权重；边改边读会写出两步混合的状态，重启后无法使用。",
            ),
        ),
        Question(
            Words(
                "70B with AdamW: how large is a checkpoint, and how long to 10 GB/s of storage?",
                "70B 模型 AdamW 的检查点有多大，写到 10 GB/s 的存储要多久？",
            ),
            Words(
                "About 14 bytes for each parameter (bf16 weights, float32 master and two "
                "moments): 980 GB, 98 s. In the "
                "background over an interval of 30 minutes that is 5% of the storage's time and none of the GPU's.",
                "每参数约 14 字节（bf16 权重、fp32 主权重和两个动量），约 980 GB，98 秒；若在 "
                "30 分钟间隔内后台写，只占存储 5% 的时间，不占 GPU。",
            ),
        ),
        Question(
            Words(
                "How does a reader know that a checkpoint is whole?",
                "读取方如何判断检查点是完整的？",
            ),
            Words(
                "By a marker that is written last, after all ranks' files are on disk, with "
                "sizes and checksums; a folder "
                "without it is ignored.",
                "看最后才写的完成标记：所有 rank 的文件落盘后写入，内含大小与校验和；没有标记的目录会被忽略。",
            ),
        ),
    ),
    seconds=5.0,
)
