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

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

RECORD = 512
GROUPS = (1, 4, 16, 64)


def run(bench: Workbench) -> Outcome:
    count = bench.size("records")
    groups = [group for group in GROUPS if group <= count]
    path = bench.folder / "log"
    bench.step("one record, one fsync")
    one_s = median(appended_s(path, 1, 1) for _ in range(bench.pick(25, 9)))
    plain_s = median(appended_s(path, count, 0) for _ in range(5))
    measured, model = [], []
    for group in groups:
        bench.step(f"{group} records for each fsync")
        repeats = bench.pick(5, 3)
        measured.append(median(appended_s(path, count, group) for _ in range(repeats)))
        model.append(count / group * one_s + plain_s)
    return Outcome(
        checks=_checks(count, model, measured),
        plots=[
            Plot(
                title=Words(f"{count} records of {RECORD} bytes", f"{count} 条 {RECORD} 字节记录"),
                x=Words("records per fsync", "每次 fsync 的记录数"),
                y=Words("ms", "毫秒"),
                lines={
                    "predicted": [(g, s * 1e3) for g, s in zip(groups, model, strict=True)],
                    "measured": [(g, s * 1e3) for g, s in zip(groups, measured, strict=True)],
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
            rows=[[g, a * 1e3, b * 1e3] for g, a, b in zip(groups, measured, model, strict=True)],
        ),
    )


def _checks(count: int, model: list[float], measured: list[float]) -> list[Check]:
    return [
        Check(
            what=Words(f"{count} records, an fsync each", f"{count} 条记录，逐条 fsync"),
            predicted=model[0] * 1e3,
            measured=measured[0] * 1e3,
            unit="ms",
            within=0.6,
        ),
        Check(
            what=Words("gathered over each, by time", "合并提交与逐条提交的耗时比"),
            predicted=model[-1] / model[0],
            measured=measured[-1] / measured[0],
            unit="x",
            kind="at_most",
            within=2.0,  # one fsync of many records writes more than one of a single record
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


LAB = described(__file__, run)
