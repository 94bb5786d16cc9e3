"""When does memory become memory? At the first touch of each page, and the kernel counts it.

    mmap ──> no memory yet ──touch──> minor fault: a zeroed page ──touch again──> nothing

A mapping of n pages costs exactly n faults, whatever asks for it; used again it costs none. That is why our network
code keeps its receive buffers, and why a first step is slower than the second.
"""

import mmap
import resource
import time

from cairn.labs.lab import Check, Outcome, Plot, Points, Rows, Table, Words, described
from cairn.labs.workbench import Workbench

PAGE = mmap.PAGESIZE


def run(bench: Workbench) -> Outcome:
    sizes = bench.pick((4, 16, 64, 128), (4, 16))
    rows, first_line, again_line = [], [], []
    faults, again_faults, pages = 0, 0, 0
    for mebibytes in sizes:
        bench.step(f"first touch of {mebibytes} MiB")
        memory = small_pages(mebibytes << 20)
        fresh, fresh_s = touched(memory)
        again, again_s = touched(memory)
        memory.close()
        count = (mebibytes << 20) // PAGE
        faults, again_faults, pages = faults + fresh, again_faults + again, pages + count
        first_line.append((mebibytes, fresh_s / count * 1e9))
        again_line.append((mebibytes, again_s / count * 1e9))
        rows.append([mebibytes, count, fresh, again, fresh_s * 1e3, again_s * 1e3])
    slower = sum(row[4] for row in rows) / sum(row[5] for row in rows)
    return Outcome(
        checks=[
            Check(
                what=Words("faults of all first touches", "首次触碰的缺页总数"),
                predicted=pages,
                measured=faults,
                unit="faults",
                within=0.02,
            ),
            Check(
                what=Words("faults of the second touches, per page", "再次触碰每页的缺页数"),
                predicted=0.02,
                measured=again_faults / pages,
                unit="faults",
                kind="at_most",
            ),
            Check(
                what=Words("first touch over second, by time", "首次与再次触碰的耗时比"),
                predicted=2.0,
                measured=slower,
                unit="x",
                kind="at_least",
            ),
        ],
        plots=[_plot(first_line, again_line)],
        table=_table(rows),
    )


def _plot(first_line: Points, again_line: Points) -> Plot:
    return Plot(
        title=Words("Touching a page", "触碰一页"),
        x=Words("MiB", "MiB"),
        y=Words("ns per page", "每页纳秒"),
        lines={"first touch": first_line, "second touch": again_line},
        log_x=True,
        log_y=True,
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("MiB", "MiB"),
            Words("pages", "页数"),
            Words("faults, first", "首次缺页"),
            Words("faults, second", "再次缺页"),
            Words("ms, first", "首次毫秒"),
            Words("ms, second", "再次毫秒"),
        ],
        rows=rows,
    )


def small_pages(size: int) -> mmap.mmap:
    """Fresh memory of which the kernel may not make huge pages."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def touched(memory: mmap.mmap) -> tuple[int, float]:
    """Minor faults and CPU seconds of writing one byte into each page; faults are work of this very thread."""
    import numpy as np

    view = np.frombuffer(memory, np.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    began = time.thread_time()
    view[::PAGE] = 1
    seconds = time.thread_time() - began
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    del view  # the mapping cannot be closed while somebody looks into it
    return faults, seconds


LAB = described(__file__, run)
