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
from cairn.core.sink import Sink
from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
from cairn.labs.workbench import Workbench

CHUNKS = tuple(1 << power for power in range(8, 23, 2))  # 256 B to 4 MiB
EVENTS = 5000
COUNTERS = Path("/proc/self/io")


def run(bench: Workbench) -> Outcome:
    size = bench.pick(16 << 20, 4 << 20)
    path = bench.folder / "cached"
    path.write_bytes(os.urandom(1 << 20) * (size >> 20))
    found = []
    for chunk in CHUNKS:
        bench.step(f"reads of {chunk} bytes")
        found.append(min(read_s(path, size, chunk, bench.pick(5, 3))))
    (small, large), (first, last) = (CHUNKS[0], CHUNKS[-1]), (found[0], found[-1])
    alpha = (first - last) / (size / small - size / large)
    base = last - alpha * size / large
    model = [base + alpha * size / chunk for chunk in CHUNKS]
    errors = [abs(got / said - 1) for got, said in zip(found, model, strict=True)][1:-1]
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
    if COUNTERS.exists():  # some sandboxes hide them
        checks.append(
            Check(
                what=Words("writes for 5000 events", "5000 个事件的 write 次数"),
                predicted=EVENTS / 100,
                measured=sink_writes(bench.folder / "events.jsonl"),
                unit="calls",
                kind="at_most",
            )
        )
    return Outcome(
        checks=checks,
        plots=[_plot(size, model, found)],
        table=_table(size, found, model),
        notes=[
            Words(
                f"A call costs {alpha * 1e9:.0f} ns here (Python's own share included): as much as copying "
                f"{alpha * size / base:,.0f} bytes.",
                f"本机一次调用约 {alpha * 1e9:.0f} 纳秒（含 Python 自身开销），相当于拷贝 {alpha * size / base:,.0f} "
                f"字节。",
            )
        ],
    )


def _plot(size: int, model: list[float], found: list[float]) -> Plot:
    return Plot(
        title=Words("Reading a cached file", "读取缓存中的文件"),
        x=Words("bytes per call", "每次调用字节数"),
        y=Words("GB/s", "GB/s"),
        lines={
            "predicted": [(c, size / s / 1e9) for c, s in zip(CHUNKS, model, strict=True)],
            "measured": [(c, size / s / 1e9) for c, s in zip(CHUNKS, found, strict=True)],
        },
        log_x=True,
        log_y=True,
    )


def _table(size: int, found: list[float], model: list[float]) -> Table:
    return Table(
        columns=[
            Words("bytes per call", "每次字节数"),
            Words("calls", "调用次数"),
            Words("ms measured", "实测毫秒"),
            Words("ms predicted", "预测毫秒"),
        ],
        rows=[
            [chunk, size // chunk, got * 1e3, said * 1e3]
            for chunk, got, said in zip(CHUNKS, found, model, strict=True)
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


def sink_writes(path: Path) -> int:
    """Write calls of this process while our sink takes the events: the kernel counts them."""
    sink = Sink(path, "lab", limit=2 * EVENTS)
    sink.start()
    before = _writes()
    for number in range(EVENTS):
        sink.put(Instant("tick", at_ns=number, thread=1))
    sink.close()
    return _writes() - before


def _writes() -> int:
    lines = COUNTERS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscw"))


LAB = Lab(
    name="syscall",
    area="linux",
    title=Words("The price of entering the kernel", "进入内核的代价"),
    hypothesis=Words(
        "Reading a cached file costs a fixed price per call plus a price per byte: two chunk sizes predict all "
        "others. "
        "Gathering makes the calls vanish: our event sink needs fewer than one write per hundred events.",
        "读缓存文件的耗时 = 每次调用的固定代价 + 每字节代价：由两个块大小就能预测其余。合并写入能消去调用："
        "本项目的事件写入器每一百个事件不到一次 write。",
    ),
    run=run,
    causes=(
        Words(
            "another process took the core during one of the ends", "测量两端之一时核被别的进程占用"
        ),
        Words(
            "chunks larger than a cache are copied more slowly per byte than small ones",
            "超过缓存的大块，每字节拷贝比小块慢",
        ),
    ),
    code=("cairn/core/sink.py:Sink", "cairn/hw/measure_host.py:disk_rates"),
    reading=("FlexSC: Flexible System Call Scheduling with Exception-Less System Calls (2010)",),
    questions=(
        Question(
            Words(
                "Why is a system call dearer than a function call?",
                "系统调用为什么比函数调用贵？",
            ),
            Words(
                "The processor changes its privilege level, saves registers and (since Meltdown) may switch page "
                "tables or flush predictors: 100 to 1000 ns against 1 to 2 ns.",
                "处理器要切换特权级、保存寄存器，Meltdown 之后还可能切页表、刷新预测器：100–1000 纳秒，"
                "而函数调用只要 1–2 纳秒。",
            ),
        ),
        Question(
            Words(
                "Which three ways lead around the cost of many small calls?",
                "面对大量小调用，有哪三种办法？",
            ),
            Words(
                "Gather (buffered writes, writev, sendmmsg), share memory instead of calling (mmap, rings), and "
                "submit "
                "many at once (io_uring); kernel bypass such as RDMA is the end of that road.",
                "合并（缓冲写、writev、sendmmsg）；用共享内存代替调用（mmap、环形队列）；一次提交多个（io_uring）。"
                "走到尽头就是 RDMA 这类内核旁路。",
            ),
        ),
        Question(
            Words(
                "How do you find out that a server is bound by system calls?",
                "如何发现服务受限于系统调用？",
            ),
            Words(
                "High sys time in top or pidstat, then `strace -c -f` or `perf trace -s` for which calls, and "
                "/proc/PID/io for how many. Many calls of a few bytes are the sign.",
                "top/pidstat 里 sys 占比高，再用 `strace -c -f` 或 `perf trace -s` 看是哪些调用、/proc/PID/io "
                "看次数；"
                "大量只有几字节的调用就是信号。",
            ),
        ),
    ),
    needs=("linux",),
    seconds=1.5,
)
