"""One fault for 2 MiB instead of 512: what huge pages change, and whether this kernel gives them.

    4 KiB pages    64 MiB = 16,384 faults, 16,384 entries of the page table
    2 MiB pages    64 MiB =     32 faults,     32 entries, and the TLB reaches 512 times as far

The kernel's switch says who gets them: always, madvise (who asks) or never. The prediction is read from that switch.
"""

import mmap
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from cairn.hw.sysfs import read_int, read_text
from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.linux.page_fault import PAGE, small_pages, touched
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    import numpy as np

SWITCH = Path("/sys/kernel/mm/transparent_hugepage")
MAPS = Path("/proc/self/smaps_rollup")


def run(bench: Workbench) -> Outcome:
    mebibytes = bench.setting("mebibytes", bench.pick(128, 32))
    size = mebibytes << 20
    huge = read_int(SWITCH / "hpage_pmd_size") or 2 << 20
    allowed = huge_allowed(read_text(SWITCH / "enabled") or "never")
    by_page_size, gained = {}, {}
    for name, make in (("4 KiB", small_pages), ("huge", _huge)):
        bench.step(f"{mebibytes} MiB in {name} pages")
        memory = make(size + huge)  # a piece that is aligned lies inside
        before = huge_bytes()
        faults, seconds = touched(memory)
        gained[name] = huge_bytes() - before
        by_page_size[name] = (faults, seconds, _random_ns(memory, bench.pick(400_000, 100_000)))
        memory.close()
    small, large = by_page_size["4 KiB"], by_page_size["huge"]
    expected = size / huge + huge / PAGE if allowed else (size + huge) / PAGE
    return Outcome(
        checks=[
            Check(
                what=Words("faults with small pages", "小页的缺页数"),
                predicted=(size + huge) / PAGE,
                measured=small[0],
                unit="faults",
                within=0.02,
            ),
            Check(
                what=Words("faults where huge pages are asked for", "请求大页时的缺页数"),
                predicted=expected,
                measured=large[0],
                unit="faults",
                kind="at_most",
                within=0.05,
            ),
            Check(
                what=Words("memory that lies in huge pages", "落在大页上的内存"),
                predicted=mebibytes if allowed and MAPS.exists() else 0,
                measured=gained["huge"] >> 20,
                unit="MiB",
                within=0.1,
            ),
        ],
        table=_table(by_page_size),
        notes=[_note(allowed)],
    )


def _table(by_page_size: dict[str, tuple[int, float, float]]) -> Table:
    return Table(
        columns=[
            Words("pages", "页"),
            Words("faults", "缺页"),
            Words("ms, first touch", "首次触碰毫秒"),
            Words("ns, random read", "随机读纳秒"),
        ],
        rows=[
            [name, faults, seconds * 1e3, read]
            for name, (faults, seconds, read) in by_page_size.items()
        ],
    )


def _note(allowed: bool) -> Words:
    return Words(
        f"transparent_hugepage is '{(read_text(SWITCH / 'enabled') or 'absent').strip()}': who asks "
        f"{'gets' if allowed else 'does not get'} huge pages here.",
        f"transparent_hugepage 为“{(read_text(SWITCH / 'enabled') or '无').strip()}”："
        f"本机上请求大页的程序{'会' if allowed else '不会'}得到大页。",
    )


def huge_allowed(switch: str) -> bool:
    """Whether memory that was advised gets huge pages: the word in brackets counts."""
    return "[always]" in switch or "[madvise]" in switch


def huge_bytes() -> int:
    """Memory of this process in huge pages, as the kernel sums it up; 0 where it does not say."""
    lines = (read_text(MAPS) or "").splitlines()
    return next((int(one.split()[1]) << 10 for one in lines if one.startswith("AnonHuge")), 0)


def _huge(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _random_ns(memory: mmap.mmap, count: int) -> float:
    """A read at a random place: a miss of the TLB walks the page table."""
    import numpy as np

    view = np.frombuffer(memory, np.int64)
    places = np.random.default_rng(0).integers(0, len(view), count)
    seconds = median(_gather_s(view, places) for _ in range(5))
    del view
    return seconds / count * 1e9


def _gather_s(view: "np.ndarray", places: "np.ndarray") -> float:
    began = time.thread_time()
    view.take(places)
    return time.thread_time() - began


LAB = described(__file__, run)
