"""What does a system call cost, and why do programs gather their writes?

    time(chunk) = bytes / beta + calls * alpha        reading a cached file in chunks

Two chunk sizes, the smallest and the largest, give alpha and beta; the sizes between are predicted. Then our own event
sink shows the remedy: thousands of records leave in a handful of writes, counted by the kernel itself.
"""

import os
import time
from pathlib import Path
from statistics import median

from cairn.core.records import Instant
from cairn.core.sink import EventSink
from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

CHUNKS = tuple(1 << power for power in range(8, 23, 2))  # 256 B to 4 MiB
EVENTS = 5000
COUNTERS = Path("/proc/self/io")


def run(bench: Workbench) -> Outcome:
    size = bench.pick(16 << 20, 4 << 20)
    path = bench.folder / "cached"
    path.write_bytes(os.urandom(1 << 20) * (size >> 20))
    measured = []
    for chunk in CHUNKS:
        bench.step(f"reads of {chunk} bytes")
        measured.append(min(read_s(path, size, chunk, bench.pick(5, 3))))
    (small, large), (first, last) = (CHUNKS[0], CHUNKS[-1]), (measured[0], measured[-1])
    alpha = (first - last) / (size / small - size / large)
    base = last - alpha * size / large
    model = [base + alpha * size / chunk for chunk in CHUNKS]
    errors = [
        abs(seconds / predicted - 1) for seconds, predicted in zip(measured, model, strict=True)
    ][1:-1]
    checks = [
        Check(
            what=Words("median error between the two ends", "两端之间各点的误差中位数"),
            predicted=0.2,
            measured=median(errors),
            unit="share",
            kind="at_most",
        )
    ]
    bench.step("five thousand events")
    checks += _sink_checks(bench.folder / "events.jsonl")
    return Outcome(
        checks=checks,
        plots=[_plot(size, model, measured)],
        table=_table(size, measured, model),
        notes=[
            Words(
                f"A call costs {alpha * 1e9:.0f} ns here (Python's own share included): as much as copying "
                f"{alpha * size / base:,.0f} bytes.",
                f"本机一次调用约 {alpha * 1e9:.0f} 纳秒（含 Python 自身开销），相当于拷贝 {alpha * size / base:,.0f} "
                f"字节。",
            )
        ],
    )


def _plot(size: int, model: list[float], measured: list[float]) -> Plot:
    return Plot(
        title=Words("Reading a cached file", "读取缓存中的文件"),
        x=Words("bytes per call", "每次调用字节数"),
        y=Words("GB/s", "GB/s"),
        lines={
            "predicted": [(c, size / s / 1e9) for c, s in zip(CHUNKS, model, strict=True)],
            "measured": [(c, size / s / 1e9) for c, s in zip(CHUNKS, measured, strict=True)],
        },
        log_x=True,
        log_y=True,
    )


def _table(size: int, measured: list[float], model: list[float]) -> Table:
    return Table(
        columns=[
            Words("bytes per call", "每次字节数"),
            Words("calls", "调用次数"),
            Words("ms measured", "实测毫秒"),
            Words("ms predicted", "预测毫秒"),
        ],
        rows=[
            [chunk, size // chunk, seconds * 1e3, predicted * 1e3]
            for chunk, seconds, predicted in zip(CHUNKS, measured, model, strict=True)
        ],
    )


def read_s(path: Path, size: int, chunk: int, repeats: int) -> list[float]:
    """CPU seconds of several readings into one buffer: fresh memory would cost page faults."""
    buffer, seconds = bytearray(chunk), []
    with path.open("rb", buffering=0) as file:
        for _ in range(repeats):
            file.seek(0)
            began = time.thread_time()
            for _ in range(size // chunk):
                file.readinto(buffer)
            seconds.append(time.thread_time() - began)
    return seconds


def _sink_checks(path: Path) -> list[Check]:
    """Few calls are no merit where events are lost, so both are looked at."""
    writes = sink_writes(path)
    in_file = sum('"tick"' in line for line in path.read_text(encoding="utf-8").splitlines())
    checks = [
        Check(
            what=Words("events that are in the file", "文件中的事件数"),
            predicted=EVENTS,
            measured=in_file,
            unit="events",
        )
    ]
    if writes is None:  # some sandboxes hide the counters
        return checks
    few = Check(
        what=Words("writes for 5000 events", "5000 个事件的 write 次数"),
        predicted=EVENTS / 100,
        measured=writes,
        unit="calls",
        kind="at_most",
    )
    return [few, *checks]


def sink_writes(path: Path) -> int | None:
    """Write calls of this process while our sink takes the events: the kernel counts them, where it shows them."""
    sink = EventSink(path, "lab", limit=2 * EVENTS)
    sink.start()
    before = _writes()
    for number in range(EVENTS):
        sink.put(Instant("tick", at_ns=number, thread=1))
    sink.close()
    after = _writes()
    return None if before is None or after is None else after - before


def _writes() -> int | None:
    if not COUNTERS.exists():
        return None
    lines = COUNTERS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscw"))


LAB = described(__file__, run)
