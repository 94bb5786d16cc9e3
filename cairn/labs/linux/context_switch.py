"""What does it cost to wake another process and wait for its answer?

    A  write ─sleep························ wake
    B        wake  read  write ─sleep········
             └ switch                └ switch

A byte goes to and fro through two pipes. On one core every round takes the core from each process exactly once, whether
it goes to sleep (voluntary) or is pushed off by the one it woke (involuntary): the kernel counts both. Over TCP the
same round also passes the network stack, so it cannot be quicker.
"""

import os
import resource
import select
import time
from statistics import median
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.linux._partner import allowed_cpus, started
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.hw.ceilings import Measured


def run(bench: Workbench) -> Outcome:
    cpus = allowed_cpus()
    rounds = bench.setting("rounds", bench.pick(4000, 800))
    bench.step("to and fro on one core")
    same = ping_pong(rounds, cpus[0], cpus[0])
    bench.step("to and fro between cores")
    other = ping_pong(rounds, cpus[0], cpus[-1])
    call_s = _call_s()
    tcp = bench.ceilings.loopback_round_trip
    checks = [
        Check(
            what=Words("switches of each per round, on one core", "同核时每轮各自的切换次数"),
            predicted=1.0,
            measured=same[1] + same[2],
            unit="switches",
            within=0.2,
        ),
        Check(
            # Two switches cost at least as much as the four calls around them.
            what=Words("a round on one core over four bare calls", "同核一轮与四次裸系统调用之比"),
            predicted=2.0,
            measured=same[0] / (4 * call_s),
            unit="x",
            kind="at_least",
        ),
    ]
    if tcp is not None:
        checks.append(
            Check(
                what=Words(
                    "a round through pipes, TCP's as the limit", "管道一轮耗时（以 TCP 为上限）"
                ),
                predicted=tcp.value * 1e6,
                measured=min(same[0], other[0]) * 1e6,
                unit="us",
                kind="at_most",
                within=0.3,
            )
        )
    switch_us = (same[0] - 4 * call_s) / 2 * 1e6
    return Outcome(
        checks=checks,
        table=_table(same, other, tcp, call_s),
        notes=[
            Words(
                f"A round on one core is four calls and two switches: about {switch_us:.1f} us for a switch.",
                f"同核的一轮是四次系统调用加两次切换：一次切换约 {switch_us:.1f} 微秒。",
            )
        ],
    )


def _table(
    same: tuple[float, float, float],
    other: tuple[float, float, float],
    tcp: "Measured | None",
    call_s: float,
) -> Table:
    return Table(
        columns=[
            Words("where", "位置"),
            Words("us per round", "每轮微秒"),
            Words("went to sleep", "主动睡眠次数"),
            Words("pushed off", "被抢占次数"),
        ],
        rows=[
            ["one core", same[0] * 1e6, *same[1:]],
            ["two cores", other[0] * 1e6, *other[1:]],
            ["TCP, two processes", tcp.value * 1e6 if tcp else "–", "–", "–"],
            ["one bare system call", call_s * 1e6, 0, 0],
        ],
    )


def ping_pong(rounds: int, mine: int, theirs: int) -> tuple[float, float, float]:
    """Seconds of one round (median of ten parts); how often in it this process slept, and was pushed off."""
    there, back = os.pipe(), os.pipe()
    before = os.sched_getaffinity(0)
    descriptors = (there[0], back[1])
    try:
        with started(
            "echo", str(there[0]), str(back[1]), str(rounds), cpus=[theirs], pass_fds=descriptors
        ):
            os.sched_setaffinity(0, {mine})
            _round(there[1], back[0])  # it has started
            before_all = resource.getrusage(resource.RUSAGE_THREAD)
            part = (rounds - 1) // 10
            seconds = []
            for _ in range(10):
                began = time.perf_counter()
                for _ in range(part):
                    _round(there[1], back[0])
                seconds.append((time.perf_counter() - began) / part)
            after = resource.getrusage(resource.RUSAGE_THREAD)
    finally:
        os.sched_setaffinity(0, before)
        for descriptor in (*there, *back):
            os.close(descriptor)
    counted = 10 * part
    slept = (after.ru_nvcsw - before_all.ru_nvcsw) / counted
    return median(seconds), slept, (after.ru_nivcsw - before_all.ru_nivcsw) / counted


def _round(target: int, source: int) -> None:
    os.write(target, b"x")
    if not select_ready(source):
        raise TimeoutError("the other process did not answer within 10 s")
    os.read(source, 1)


def select_ready(source: int) -> bool:
    return bool(select.select([source], [], [], 10.0)[0])


def _call_s() -> float:
    """One system call that does nothing but enter and leave the kernel."""
    count = 2000
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(count):
            os.getppid()
        seconds.append((time.perf_counter() - began) / count)
    return median(seconds)


LAB = described(__file__, run)
