"""Do two threads of Python do twice the work? Only while they are outside of Python.

    pure Python      T1 ██  ██  ██      one lock: they take turns
                     T2   ██  ██  ██
    hashing, numpy,  T1 ██████          the lock is given away: both run
    torch, I/O       T2 ██████

How many cores two threads keep busy (CPU time over wall time) says it directly: never more than one with the lock.
Processes have a lock each, which is why our tokenizer pool and our ranks are processes.
"""

import sys
import threading
import time
from collections.abc import Callable

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.linux._partner import allowed_cpus, blocks_for, burn, burn_together
from cairn.labs.workbench import Workbench


def run(bench: Workbench) -> Outcome:
    seconds = bench.pick(0.5, 0.15)
    loops = _loops_for(seconds)
    blocks = blocks_for(seconds)
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    bench.step("two threads of pure Python")
    python = threads_cores(lambda: count(loops), 2)
    bench.step("two threads that hash")
    hashing = threads_cores(lambda: burn(blocks), 2)
    bench.step("two processes")
    both = burn_together(blocks, [allowed_cpus()] * 2)
    processes = sum(one.cpu_s for one in both) / max(one.wall_s for one in both)
    return Outcome(
        checks=[
            Check(
                what=Words("cores of two Python threads", "两个纯 Python 线程占用的核数"),
                predicted=1.0 if locked else 2.0,
                measured=python,
                unit="cores",
                kind="at_most",
                within=0.1,
            ),
            Check(
                what=Words("hashing threads over Python threads, by cores", "哈希线程与 Python 线程的核数比"),
                predicted=2.0 if locked else 1.0,
                measured=hashing / python,
                unit="x",
                within=0.35,
            ),
            Check(
                what=Words("hashing threads over two processes, by cores", "哈希线程与两个进程的核数比"),
                predicted=1.0,
                measured=hashing / processes,
                unit="x",
                within=0.35,  # half as many is what a lock that is held would leave
            ),
        ],
        table=Table(
            columns=[Words("two of", "两个"), Words("cores busy", "占用核数")],
            rows=[
                ["threads, pure Python", python],
                ["threads, hashing", hashing],
                ["processes, hashing", processes],
            ],
        ),
        notes=[
            _note(locked)
        ],
    )  # fmt: skip


def _note(locked: bool) -> Words:
    return Words(
        f"This Python {'has' if locked else 'has no'} global interpreter lock.",
        f"此 Python {'带' if locked else '不带'}全局解释器锁。",
    )


def count(loops: int) -> int:
    """Work that never leaves the interpreter."""
    total = 0
    for number in range(loops):
        total += number & 7
    return total


def threads_cores(work: Callable[[], object], threads: int) -> float:
    """How many cores the threads kept busy: CPU seconds of this process per second."""
    workers = [threading.Thread(target=work) for _ in range(threads)]
    began, spent = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return (time.process_time() - spent) / (time.perf_counter() - began)


def _loops_for(seconds: float) -> int:
    began = time.perf_counter()
    count(100_000)
    return round(100_000 * seconds / (time.perf_counter() - began))


LAB = Lab(
    name="gil",
    area="linux",
    title=Words("Two threads, one lock", "两个线程，一把锁"),
    hypothesis=Words(
        "Two threads of pure Python keep one core busy at most; two that hash large buffers give the lock away and "
        "keep "
        "as many busy as two processes do.",
        "两个纯 Python 线程最多占用一个核；两个对大缓冲做哈希的线程会释放锁，占用的核与两个进程一样多。",
    ),
    run=run,
    causes=(
        Words("other processes use the second core", "第二个核被其他进程占用"),
        Words(
            "the measured stretch was short beside starting the threads",
            "测量时间相对线程启动太短",
        ),
    ),
    code=(
        "cairn/train/data/ordered_pool.py:ordered_map",
        "cairn/train/feeder.py",
        "cairn/hw/loopback.py:travel",
    ),
    reading=(
        "Understanding the Python GIL (2010)",
        "PEP 703: Making the Global Interpreter Lock Optional in CPython (2023)",
    ),
    questions=(
        Question(
            Words(
                "When do threads help a Python server nevertheless?",
                "在什么情况下线程对 Python 服务仍然有用？",
            ),
            Words(
                "While they wait or work in C: sockets, files, tokenizers, numpy, torch kernels release the lock. A "
                "GPU engine spends its time outside of it.",
                "在等待或在 C 里工作时：套接字、文件、tokenizers、numpy、torch 算子都会释放锁；GPU "
                "推理引擎大部分时间在锁外。",
            ),
        ),
        Question(
            Words(
                "Why does a second Python thread raise the latency of the first?",
                "为什么第二个 Python 线程会抬高第一个线程的延迟？",
            ),
            Words(
                "A thread that wants the lock waits up to the switch interval (5 ms) for a busy one to let go. A "
                "detokenizer "
                "beside an engine loop therefore belongs into another process.",
                "想要锁的线程最多要等一个切换间隔（5 毫秒）才轮到；所以与引擎循环并行的反分词应放到另一个进程。",
            ),
        ),
        Question(
            Words(
                "What does the free-threaded build change, and what does it cost?",
                "自由线程版（free-threaded）改变了什么，代价是什么？",
            ),
            Words(
                "No global lock: threads of pure Python run in parallel. Single-threaded code is some 5 to 10% "
                "slower, and "
                "extensions must be built for it.",
                "没有全局锁，纯 Python 线程可以并行；单线程代码慢约 5–10%，扩展模块要重新适配。",
            ),
        ),
    ),
    needs=("linux", "2 cores"),
    seconds=2.5,
)
