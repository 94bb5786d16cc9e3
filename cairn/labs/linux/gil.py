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

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.linux._partner import allowed_cpus, blocks_for, burn, burn_together
from cairn.labs.workbench import Workbench


def run(bench: Workbench) -> Outcome:
    seconds = bench.setting("seconds", bench.pick(0.5, 0.15))
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
                what=Words(
                    "hashing threads over Python threads, by cores",
                    "哈希线程与 Python 线程的核数比",
                ),
                predicted=2.0 if locked else 1.0,
                measured=hashing / python,
                unit="x",
                within=0.35,
            ),
            Check(
                what=Words(
                    "hashing threads over two processes, by cores", "哈希线程与两个进程的核数比"
                ),
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
        notes=[_note(locked)],
    )


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


LAB = described(__file__, run)
