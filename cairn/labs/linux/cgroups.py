"""What does "0.2 CPUs" mean for a request that needs 60 ms? A quota is spent early and then everything stands still.

    cpu.max = 20000 100000        20 ms in each period of 100 ms
    run ██········██········██    60 ms of work: three spendings, two pauses of 80 ms

Our reader takes the quota from a cgroup's files (here made up, in the lab's own folder, so that no root is needed), and
a throttler made of two signals plays the kernel: it lets a partner run for its quota and stops it for the rest of the
period. The limits of this process itself are read too.
"""

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

from cairn.hw.cgroup import cpu_quota, memory_limit
from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.linux._partner import blocks_for, started
from cairn.labs.workbench import Workbench

PERIOD_S = 0.1
QUOTA = 0.2


def run(bench: Workbench) -> Outcome:
    bench.step("reading a quota")
    quota = cpu_quota(made_up_root(bench.folder, QUOTA)) or 0.0
    work_s = bench.size("work_s")
    blocks = blocks_for(work_s)
    bench.step("throttled")
    ran_s, stopped_s, cpu_s = throttled(blocks, quota, PERIOD_S)
    expected = stops(cpu_s, quota, PERIOD_S) * (1 - quota) * PERIOD_S
    here, (limit, _) = cpu_quota(Path("/")), memory_limit(Path("/"))
    return Outcome(
        checks=[
            Check(
                what=Words("quota our reader finds", "读到的配额"),
                predicted=QUOTA,
                measured=quota,
                unit="CPUs",
            ),
            Check(
                what=Words(
                    "CPU time over wall time, the quota as the limit",
                    "CPU 时间/墙上时间（以配额为上限）",
                ),
                # The last stretch is not followed by a pause, so a little more than the quota.
                predicted=cpu_s / (cpu_s + expected),
                measured=cpu_s / (ran_s + stopped_s),
                unit="CPUs",
                kind="at_most",
                within=0.3,
            ),
            Check(
                what=Words("time it stood still", "被停住的时间"),
                predicted=expected * 1e3,
                measured=stopped_s * 1e3,
                unit="ms",
                kind="at_least",
                within=0.3,
            ),
        ],
        table=Table(
            columns=[Words("what", "项目"), Words("ms", "毫秒")],
            rows=[
                ["CPU time it needed", cpu_s * 1e3],
                ["allowed to run", ran_s * 1e3],
                ["stood still", stopped_s * 1e3],
                ["from start to end", (ran_s + stopped_s) * 1e3],
            ],
        ),
        notes=[_note(here, limit)],
    )


def _note(here: float | None, limit: int | None) -> Words:
    return Words(
        f"This process: CPU quota {here if here is not None else 'none'}, memory limit "
        f"{f'{limit / 2**30:.1f} GiB' if limit else 'none'}.",
        f"本进程：CPU 配额 {here if here is not None else '无'}，内存上限 "
        f"{f'{limit / 2**30:.1f} GiB' if limit else '无'}。",
    )


def made_up_root(folder: Path, quota: float) -> Path:
    """A file system root with one version 2 cgroup that has this quota."""
    group = folder / "sys/fs/cgroup/pod"
    group.mkdir(parents=True)
    (folder / "sys/fs/cgroup/cgroup.controllers").write_text("cpu memory\n")
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text("0::/pod\n")
    (group / "cpu.max").write_text(f"{round(quota * 100_000)} 100000\n")
    return folder


def stops(work_s: float, quota: float, period_s: float) -> int:
    """How often work is stopped: after each full quota, but not when it is just finished."""
    return int((work_s - 1e-9) // (quota * period_s))


def throttled(blocks: int, quota: float, period_s: float) -> tuple[float, float, float]:
    """Seconds a partner was allowed to run, was stopped, and computed, under a quota."""
    ran = stopped = 0.0
    with started("burn", str(blocks)) as partner:
        assert partner.stdin is not None
        assert partner.stdout is not None
        partner.stdout.readline()
        partner.stdin.write(b"g")
        partner.stdin.flush()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            ended, seconds = _spend(partner, quota * period_s)
            ran += seconds
            if ended:
                return ran, stopped, json.loads(partner.stdout.readline())[1]
            stopped += _stand_still(partner.pid, period_s * (1 - quota))
    raise TimeoutError("the partner did not end within 20 s")


def _spend(partner: "subprocess.Popen[bytes]", cpu_s: float) -> tuple[bool, float]:
    """Until it has used so much CPU time, or has said its result; and how long that took."""
    assert partner.stdout is not None
    begin, used = time.perf_counter(), _cpu_s(partner.pid)
    while _cpu_s(partner.pid) - used < cpu_s:
        if select.select([partner.stdout], [], [], 0.001)[0]:
            return True, time.perf_counter() - begin
    return False, time.perf_counter() - begin


def _stand_still(pid: int, seconds: float) -> float:
    begin = time.perf_counter()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)
    return time.perf_counter() - begin


def _cpu_s(pid: int) -> float:
    """Nanoseconds on a core are the first number of schedstat; it counts finer than clock ticks."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


LAB = described(__file__, run)
