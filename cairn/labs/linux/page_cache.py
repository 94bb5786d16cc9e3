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

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
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
    size = bench.pick(64 << 20, 16 << 20)
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
        notes=[] if was_forgotten else [
            Words("This filesystem keeps files in memory: cold is warm here.",
                  "此文件系统把文件留在内存：这里的冷读就是热读。")
        ],
    )  # fmt: skip


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
                size / found.seconds / 1e9,
                _gb(limit),
                found.disk_bytes / 2**20,
                found.major_faults,
            ]
            for name, found, limit in (
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


LAB = Lab(
    name="page-cache",
    area="linux",
    title=Words("Cold and warm: the page cache and mmap", "冷与热：页缓存和 mmap"),
    hypothesis=Words(
        "A mapped file that is cached is read without a single major fault; a cold one needs them, but fewer than "
        "one for "
        "every four pages, because the kernel reads ahead.",
        "已缓存的映射文件读一遍不产生任何主缺页；冷文件会产生，但由于内核预读，每四页不到一次。",
    ),
    run=run,
    causes=(
        Words(
            "memory was short and the kernel dropped pages between the readings",
            "内存不足，内核在两次读之间丢掉了页",
        ),
        Words(
            "the disk is a cache of a hypervisor, so cold is nearly warm",
            "磁盘背后是虚拟机监控器的缓存，冷读几乎等于热读",
        ),
    ),
    code=(
        "cairn/train/data/store.py:Store",
        "cairn/hw/measure_host.py:disk_rates",
        "cairn/labs/linux/page_cache.py:read_mapped",
    ),
    reading=(
        "Are You Sure You Want to Use MMAP in Your Database Management System? (2022)",
        "mmap(2), Linux manual pages",
    ),
    questions=(
        Question(
            Words(
                "Why does free memory look small on a healthy training node?",
                "为什么健康的训练节点上空闲内存看起来很少？",
            ),
            Words(
                "The page cache uses what nobody needs and gives it back at once. Look at 'available' in free, or "
                "MemAvailable, not at 'free'.",
                "页缓存会用掉没人要的内存，需要时立刻归还。应看 free 的 available（MemAvailable），而不是 free。",
            ),
        ),
        Question(
            Words(
                "Ten processes map the same 20 GB token store. How much memory is that?",
                "十个进程映射同一个 20 GB 的 token 文件，占多少内存？",
            ),
            Words(
                "20 GB at most: the pages are the page cache's and shared. RSS counts them in each process; PSS "
                "divides them.",
                "最多 20 GB：页属于页缓存、由大家共享。RSS 会在每个进程里重复计算，PSS 才按份均摊。",
            ),
        ),
        Question(
            Words(
                "When is O_DIRECT better than the page cache?",
                "什么时候 O_DIRECT 比页缓存更好？",
            ),
            Words(
                "When data is used once or cached by the program itself: checkpoints of hundreds of GB would push "
                "everything else out, and the copy costs memory bandwidth.",
                "数据只用一次或程序自带缓存时：几百 GB 的检查点会把其他缓存全挤掉，而且多一次拷贝、占内存带宽。",
            ),
        ),
    ),
    needs=("linux",),
    seconds=1.0,
)
