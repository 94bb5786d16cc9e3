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
from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.linux._partner import blocks_for, started
from cairn.labs.workbench import Workbench

PERIOD_S = 0.1
QUOTA = 0.2


def run(bench: Workbench) -> Outcome:
    bench.step("reading a quota")
    quota = cpu_quota(made_up_root(bench.folder, QUOTA)) or 0.0
    work_s = bench.pick(0.11, 0.05)
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
                what=Words("CPU time over wall time, the quota as the limit", "CPU 时间/墙上时间（以配额为上限）"),
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
        notes=[
            _note(here, limit)
        ],
    )  # fmt: skip


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


LAB = Lab(
    name="cgroups",
    area="linux",
    title=Words("A fifth of a CPU", "五分之一个 CPU"),
    hypothesis=Words(
        "With a quota of 20 ms per 100 ms, work stands still for 80 ms after every 20 ms of CPU time, so it takes "
        "about "
        "five times as long as it computes; our reader finds that quota in cpu.max.",
        "配额为每 100 毫秒 20 毫秒时，每用满 20 毫秒 CPU 就停 80 毫秒，总耗时约为计算时间的五倍；本项目能从 cpu.max "
        "读出该配额。",
    ),
    run=run,
    causes=(
        Words(
            "other processes kept the partner off the core while it was allowed to run",
            "允许运行期间，核被其他进程占用",
        ),
        Words(
            "the throttler is a process too, and was scheduled late",
            "节流器本身也是进程，被调度得晚了",
        ),
    ),
    code=(
        "cairn/hw/cgroup.py:cpu_quota",
        "cairn/hw/cgroup.py:memory_limit",
        "cairn/hw/checks_host.py",
    ),
    reading=(
        "CPU bandwidth control for CFS (2010)",
        "Control Group v2, Linux kernel documentation",
    ),
    questions=(
        Question(
            Words(
                "Average CPU use is 30% of the quota, yet p99 latency is terrible. Why?",
                "平均 CPU 只用了配额的 30%，p99 却很差，为什么？",
            ),
            Words(
                "Bursts spend a period's quota in milliseconds (eight threads spend 100 ms in 12.5 ms) and "
                "everything waits "
                "for the next period. cpu.stat's nr_throttled shows it.",
                "突发会在几毫秒内耗尽一个周期的配额（8 个线程 12.5 毫秒就用完 100 毫秒），之后全部等下个周期；"
                "cpu.stat 的 nr_throttled 能看到。",
            ),
        ),
        Question(
            Words(
                "What is the difference between cpu.weight and cpu.max?",
                "cpu.weight 与 cpu.max 有什么区别？",
            ),
            Words(
                "weight divides a core only when several want it and wastes nothing; max is a ceiling also on an "
                "idle "
                "machine. Requests in Kubernetes become weight, limits become max.",
                "weight 只在争用时按比例分配，不浪费；max 即使机器空闲也是上限。Kubernetes 的 requests 对应 weight，"
                "limits 对应 max。",
            ),
        ),
        Question(
            Words(
                "What happens at memory.max, and how is it different from a full machine?",
                "到达 memory.max 会怎样？与整机内存耗尽有何不同？",
            ),
            Words(
                "The kernel reclaims the group's page cache first and then kills a process inside the group; the "
                "rest of "
                "the machine is untouched. memory.events counts oom_kill.",
                "内核先回收该组的页缓存，仍不够就只在组内杀进程，机器其余部分不受影响；memory.events 里 oom_kill "
                "计数。",
            ),
        ),
    ),
    needs=("linux",),
    seconds=2.0,
)
