"""Who reads the disk, and who reads memory? A token file through mmap, cold and warm.

    cold   mapping ──fault──> disk ──readahead──> page cache
    warm   mapping ──fault──> page cache: no disk at all

The kernel counts what this thread took from a disk. After it was asked to forget the file, that is every byte exactly
once, with far fewer waits than pages because it reads ahead; when the file is cached it is nothing.
"""

import mmap
import os
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.hw.ceilings import Ceilings

PAGE = mmap.PAGESIZE
BLOCK = 512  # what the kernel counts block input in


class Pass(NamedTuple):
    """One reading of the whole file."""

    seconds: float
    disk_bytes: int
    major_faults: int  # waits for the disk; what was read ahead in time causes none


def run(bench: Workbench) -> Outcome:
    size = bench.size("mib") << 20
    path = bench.folder / "tokens.bin"
    bench.step("writing the file")
    write_synced(path, size)
    was_forgotten = forget(path)
    bench.step("cold")
    cold = read_mapped(path)
    bench.step("warm")
    warm = min((read_mapped(path) for _ in range(3)), key=lambda found: found.seconds)
    checks = [
        Check(
            what=Words("bytes the warm reading takes from the disk", "热读从磁盘取的字节数"),
            predicted=0,
            measured=warm.disk_bytes,
            unit="bytes",
        ),
        Check(
            what=Words("major faults of the cold reading, of its pages", "冷读主缺页占页数之比"),
            predicted=0.25,
            measured=cold.major_faults / (size // PAGE),
            unit="share",
            kind="at_most",
        ),
    ]
    if was_forgotten:
        checks.append(
            Check(
                what=Words("bytes the cold reading takes from the disk", "冷读从磁盘取的字节数"),
                predicted=size,
                measured=cold.disk_bytes,
                unit="bytes",
                within=0.05,
            )
        )
    limits = bench.ceilings
    return Outcome(
        checks=checks,
        table=_table(size, cold, limits, warm),
        notes=[]
        if was_forgotten
        else [
            Words(
                "This filesystem keeps files in memory: cold is warm here.",
                "此文件系统把文件留在内存：这里的冷读就是热读。",
            )
        ],
    )


def _table(size: int, cold: Pass, limits: "Ceilings", warm: Pass) -> Table:
    return Table(
        columns=[
            Words("reading", "读法"),
            Words("GB/s", "GB/s"),
            Words("ceiling GB/s", "上限 GB/s"),
            Words("MiB from the disk", "磁盘 MiB"),
            Words("major faults", "主缺页"),
        ],
        rows=[
            [
                name,
                size / reading.seconds / 1e9,
                _gb(limit),
                reading.disk_bytes / 2**20,
                reading.major_faults,
            ]
            for name, reading, limit in (
                ("cold", cold, limits.disk_read_cold),
                ("warm", warm, limits.disk_read_warm),
            )
        ],
    )


def write_synced(path: Path, size: int) -> None:
    """On the disk for good, so that the kernel can forget its copy."""
    block = os.urandom(1 << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(size >> 20):
            file.write(block)
        os.fsync(file.fileno())


def forget(path: Path) -> bool:
    """Ask the kernel to drop the file from its cache; whether it did."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 0
        except OSError:  # it would have had to wait for the disk
            return True


def read_mapped(path: Path) -> Pass:
    """One pass over a fresh mapping, as a reader of a token store does it."""
    import numpy as np

    before = resource.getrusage(resource.RUSAGE_THREAD)
    began = time.perf_counter()
    tokens = np.memmap(path, np.uint16, mode="r")
    for begin in range(0, len(tokens), 1 << 20):
        tokens[begin : begin + (1 << 20)].sum(dtype=np.int64)
    seconds = time.perf_counter() - began
    del tokens
    after = resource.getrusage(resource.RUSAGE_THREAD)
    blocks = after.ru_inblock - before.ru_inblock
    return Pass(seconds, blocks * BLOCK, after.ru_majflt - before.ru_majflt)


def _gb(ceiling: object) -> float | str:
    value = getattr(ceiling, "value", None)
    return "–" if value is None else value / 1e9


LAB = described(__file__, run)
