"""When does memory become memory? At the first touch of each page, and the kernel counts it.

    mmap ──> no memory yet ──touch──> minor fault: a zeroed page ──touch again──> nothing

A mapping of n pages costs exactly n faults, whatever asks for it; used again it costs none. That is why our network
code keeps its receive buffers, and why a first step is slower than the second.
"""

import mmap
import resource
import time

from cairn.labs.lab import Check, Lab, Outcome, Plot, Points, Question, Rows, Table, Words
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


LAB = Lab(
    name="page-fault",
    area="linux",
    title=Words("Memory begins at the first touch", "内存从第一次触碰开始"),
    hypothesis=Words(
        "Fresh memory costs one minor fault for each page that is touched, exactly; touching it again costs none and "
        "is "
        "at least twice as quick.",
        "新内存每触碰一页就恰好产生一次次缺页（minor fault）；再次触碰不再缺页，至少快一倍。",
    ),
    run=run,
    causes=(
        Words(
            "the kernel maps several pages with one fault (fault-around, folios, huge pages)",
            "内核一次缺页映射多页（fault-around、folio、大页）",
        ),
        Words(
            "memory pressure took pages back between the two touches",
            "内存紧张，两次触碰之间页被回收",
        ),
    ),
    code=("cairn/hw/loopback.py:_fill", "cairn/comm/backend/segment.py:Segment"),
    reading=(
        "Understanding the Linux Virtual Memory Manager (2004)",
        "getrusage(2), Linux manual pages",
    ),
    questions=(
        Question(
            Words(
                "Why is malloc of 10 GB instant and memset of it is not?",
                "为什么 malloc 10 GB 是瞬间完成的，而 memset 不是？",
            ),
            Words(
                "malloc maps addresses only. memset touches 2.6 million pages of 4 KiB: each is a fault and 4 KiB of "
                "zeros, together a second or more.",
                "malloc 只映射地址；memset 要触碰 260 万个 4 KiB 页，每页一次缺页加清零 4 KiB，合计一秒以上。",
            ),
        ),
        Question(
            Words(
                "What is the difference between a minor and a major fault?",
                "minor fault 与 major fault 有什么区别？",
            ),
            Words(
                "Minor: the page is in memory (or only needs zeros) and is just mapped, about a microsecond. Major: "
                "it "
                "has to come from a disk, a hundred microseconds to milliseconds.",
                "minor：页已在内存（或只需清零），映射一下即可，约 1 微秒；major：要从磁盘读，百微秒到毫秒级。",
            ),
        ),
        Question(
            Words(
                "Why must memory for RDMA or a GPU's DMA be pinned?",
                "为什么 RDMA 或 GPU DMA 使用的内存必须锁页？",
            ),
            Words(
                "The device writes to physical addresses and cannot take a fault in the middle. Pinning makes every "
                "page present and keeps it in place.",
                "设备按物理地址写，中途无法处理缺页；锁页保证每页都在内存且不被移动。",
            ),
        ),
    ),
    needs=("linux",),
    seconds=0.8,
)
