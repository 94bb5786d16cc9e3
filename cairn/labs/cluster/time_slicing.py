"""Two tenants on one device: taking turns, or a part each?

    time slicing   AAAA BBBB AAAA BBBB     each has everything half of the time: half the speed, and pauses
    partition      AA AA AA AA             each has half of it all the time (MIG, a core each): no pauses
                   BB BB BB BB

A CPU core plays the device: two processes on the same core take turns under the kernel, two on their own cores do not.
"""

import os
import subprocess
import sys

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench

# Counts small pieces of work until the time is up, and notes the longest pause between two of them.
PROGRAM = """
import os, sys, time
core, begin, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
os.sched_setaffinity(0, {core})
while time.time() < begin:
    pass
count, longest, last = 0, 0.0, time.perf_counter()
end = time.time() + seconds
used = time.process_time()
while time.time() < end:
    for _ in range(200):
        pass
    count += 1
    now = time.perf_counter()
    longest, last = max(longest, now - last), now
print(count, longest, time.process_time() - used)
"""


def compete(cores: list[int], seconds: float) -> list[tuple[int, float, float]]:
    """One process for each entry, begun together: work done, longest pause, CPU seconds that it got."""
    import time

    begin = time.time() + 0.5
    command = [sys.executable, "-S", "-c", PROGRAM]
    running = [
        subprocess.Popen(
            [*command, str(core), str(begin), str(seconds)], stdout=subprocess.PIPE, text=True
        )
        for core in cores
    ]
    shares = []
    for process in running:
        try:
            words = process.communicate(timeout=seconds + 20)[0].split()
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        shares.append((int(words[0]), float(words[1]), float(words[2])))
    return shares


def run(bench: Workbench) -> Outcome:
    seconds = bench.setting("seconds", bench.pick(0.8, 0.4))
    cores = sorted(os.sched_getaffinity(0))[:2]
    bench.step("two processes on one core")
    turns = compete([cores[0], cores[0]], seconds)
    bench.step("a core each")
    apart = compete(cores, seconds)
    cpu_s = [share for _, _, share in turns]
    rows = [
        [
            "one core, in turns",
            *(count for count, _, _ in turns),
            sum(cpu_s) / seconds,
            max(p for _, p, _ in turns) * 1e3,
        ],
        [
            "a core each",
            *(count for count, _, _ in apart),
            sum(s for _, _, s in apart) / seconds,
            max(p for _, p, _ in apart) * 1e3,
        ],
    ]
    together, alone = (sum(c for c, _, _ in side) for side in (turns, apart))
    return Outcome(
        checks=_checks(cpu_s, seconds, turns, alone, together),
        table=Table(
            columns=[
                Words("way", "方式"),
                Words("work of A", "A 的工作量"),
                Words("work of B", "B 的工作量"),
                Words("cores used", "占用核数"),
                Words("longest pause, ms", "最长停顿（毫秒）"),
            ],
            rows=rows,
        ),
        notes=[
            Words(
                "On a GPU a time slice is some milliseconds and memory is not divided: both tenants have to fit at "
                "once. MIG divides SMs, L2 and memory; MPS runs both at once without walls between them.",
                "GPU 的时间片约几毫秒，且显存不划分：两个租户必须同时放得下。MIG 划分 SM、L2 和显存；MPS "
                "让两者同时运行但没有隔离。",
            )
        ],
    )


def _checks(
    cpu_s: list[float],
    seconds: float,
    turns: list[tuple[int, float, float]],
    alone: float,
    together: float,
) -> list[Check]:
    return [
        Check(
            what=Words("share of the first of two in turns", "轮流时第一个的份额"),
            predicted=0.5,
            measured=cpu_s[0] / sum(cpu_s),
            unit="share",
            within=0.2,
        ),
        Check(
            what=Words(
                "CPU time of both together on one core, at most",
                "同一核上两者 CPU 时间之和（最多）",
            ),
            predicted=1.0,
            measured=sum(cpu_s) / seconds,
            unit="cores",
            kind="at_most",
            within=0.1,
        ),
        Check(
            what=Words(
                "longest pause in turns, at least one slice of the kernel",
                "轮流时的最长停顿（至少一个时间片）",
            ),
            predicted=1.0,
            measured=max(pause for _, pause, _ in turns) * 1e3,
            unit="ms",
            kind="at_least",
        ),
        Check(
            what=Words("work of both, a core each over in turns", "两者总工作量：各一核 / 轮流"),
            predicted=2.0,
            measured=alone / together,
            unit="x",
            kind="at_least",
            within=0.35,
        ),
    ]


LAB = described(__file__, run)
