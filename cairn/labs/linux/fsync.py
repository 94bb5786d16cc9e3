"""What does "it is on the disk" cost, and how do logs pay for it once instead of every time?

    each      write fsync  write fsync  write fsync       n * f
    gathered  write write write ... fsync                 n/k * f      (group commit)

A write only reaches memory; fsync waits for the disk. One fsync is measured first, with a single record; what 64
records cost in groups of 1, 4, 16 and 64 is predicted from it.
"""

import os
import time
from pathlib import Path
from statistics import median

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
from cairn.labs.workbench import Workbench

RECORD = 512
GROUPS = (1, 4, 16, 64)


def run(bench: Workbench) -> Outcome:
    count = bench.pick(64, 16)
    groups = [group for group in GROUPS if group <= count]
    path = bench.folder / "log"
    bench.step("one record, one fsync")
    one_s = median(appended_s(path, 1, 1) for _ in range(bench.pick(25, 9)))
    plain_s = median(appended_s(path, count, 0) for _ in range(5))
    found, model = [], []
    for group in groups:
        bench.step(f"{group} records for each fsync")
        repeats = bench.pick(5, 3)
        found.append(median(appended_s(path, count, group) for _ in range(repeats)))
        model.append(count / group * one_s + plain_s)
    return Outcome(
        checks=_checks(count, model, found),
        plots=[
            Plot(
                title=Words(f"{count} records of {RECORD} bytes", f"{count} 条 {RECORD} 字节记录"),
                x=Words("records per fsync", "每次 fsync 的记录数"),
                y=Words("ms", "毫秒"),
                lines={
                    "predicted": [(g, s * 1e3) for g, s in zip(groups, model, strict=True)],
                    "measured": [(g, s * 1e3) for g, s in zip(groups, found, strict=True)],
                },
                log_x=True,
                log_y=True,
                limit=("no fsync", plain_s * 1e3),
            )
        ],
        table=Table(
            columns=[
                Words("records per fsync", "每次 fsync 记录数"),
                Words("ms measured", "实测毫秒"),
                Words("ms predicted", "预测毫秒"),
            ],
            rows=[[g, a * 1e3, b * 1e3] for g, a, b in zip(groups, found, model, strict=True)],
        ),
    )


def _checks(count: int, model: list[float], found: list[float]) -> list[Check]:
    return [
        Check(
            what=Words(f"{count} records, an fsync each", f"{count} 条记录，逐条 fsync"),
            predicted=model[0] * 1e3,
            measured=found[0] * 1e3,
            unit="ms",
            within=0.6,
        ),
        Check(
            what=Words("gathered over each, by time", "合并提交与逐条提交的耗时比"),
            predicted=model[-1] / model[0],
            measured=found[-1] / found[0],
            unit="x",
            kind="at_most",
            within=0.5,
        ),
    ]


def appended_s(path: Path, count: int, group: int) -> float:
    """Seconds for `count` records at the end of the file, with an fsync after each `group`; 0: none."""
    record = os.urandom(RECORD)
    with path.open("ab", buffering=0) as file:
        began = time.perf_counter()
        for number in range(1, count + 1):
            file.write(record)
            if group and number % group == 0:
                os.fsync(file.fileno())
        return time.perf_counter() - began


LAB = Lab(
    name="fsync",
    area="linux",
    title=Words("What durable costs", "落盘的代价"),
    hypothesis=Words(
        "The time of a durable log is the number of fsyncs times one fsync, however many records each of them "
        "covers: "
        "gathering k records divides it by nearly k.",
        "持久化日志的耗时 = fsync 次数 × 单次 fsync，与每次覆盖多少记录无关：合并 k 条记录，耗时几乎缩到 1/k。",
    ),
    run=run,
    causes=(
        Words(
            "the disk has a cache of its own that answers some fsyncs at once",
            "磁盘自带缓存，部分 fsync 立即返回",
        ),
        Words(
            "other writers share the journal: their data is flushed with ours",
            "其他进程共用文件系统日志，它们的数据随我们一起刷盘",
        ),
    ),
    code=(
        "cairn/train/metrics_log.py",
        "cairn/train/checkpoint/folder.py",
        "cairn/labs/record.py:append",
    ),
    reading=(
        "All File Systems Are Not Created Equal: On the Complexity of Crafting Crash-Consistent Applications (2014)",
        "fsync(2), Linux manual pages",
    ),
    questions=(
        Question(
            Words(
                "Why is write then rename not enough for a checkpoint?",
                "为什么“先写再 rename”还不足以保证检查点安全？",
            ),
            Words(
                "The rename may reach the disk before the data. Write, fsync the file, rename, fsync the folder: "
                "only "
                "then does a power cut leave the old or the new one, whole.",
                "rename 可能先于数据落盘。要写完、fsync 文件、rename、再 fsync 目录："
                "这样断电后只会留下完整的旧版本或新版本。",
            ),
        ),
        Question(
            Words("What is group commit?", "什么是 group commit？"),
            Words(
                "Transactions that wait at the same time share one fsync. Throughput rises with the load, and the "
                "latency of each stays about one fsync (0.1 ms on NVMe with a power-safe cache, 5 to 10 ms on a "
                "spinning "
                "disk).",
                "同时等待的事务共享一次 fsync：吞吐随负载上升，而每个事务的延迟约等于一次 fsync"
                "（带掉电保护的 NVMe 约 0.1 毫秒，机械盘 5–10 毫秒）。",
            ),
        ),
        Question(
            Words(
                "fsync returned an error once. May you call it again and trust success?",
                "fsync 报过一次错，再调用成功就可信吗？",
            ),
            Words(
                "No: the kernel may have marked the dirty pages clean after the failure, so the second call succeeds "
                "without the data. Write it again, or stop.",
                "不可信：失败后内核可能已把脏页标成干净，第二次成功并不代表数据落盘。应重写数据，或直接停止。",
            ),
        ),
    ),
    needs=("linux",),
    seconds=2.0,
)
