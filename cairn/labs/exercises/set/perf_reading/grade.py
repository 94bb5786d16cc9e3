import shutil
import subprocess
import sys
from pathlib import Path

from cairn.labs.exercises.grading import Attempt, NotHere, case, close, require

# perf stat -x, -e task-clock,page-faults,context-switches,cpu-migrations of four small programs, as it printed them.
IDLE = """\
298.91,msec,task-clock,298911884,100.00,0.241,CPUs utilized
9350,,page-faults,298911884,100.00,31.280,K/sec
360,,context-switches,298911884,100.00,1.204,K/sec
6,,cpu-migrations,298911884,100.00,20.073,/sec
"""
MEMORY = """\
273.02,msec,task-clock,273016898,100.00,0.282,CPUs utilized
25774,,page-faults,273016898,100.00,94.404,K/sec
148,,context-switches,273016898,100.00,542.091,/sec
0,,cpu-migrations,273016898,100.00,0.000,/sec
"""
COMPUTING = """\
1001.02,msec,task-clock,1001020130,100.00,0.309,CPUs utilized
9362,,page-faults,1001020130,100.00,9.352,K/sec
377,,context-switches,1001020130,100.00,376.616,/sec
3,,cpu-migrations,1001020130,100.00,2.997,/sec
<not supported>,,cycles,0,100.00,,
"""


@case("numbers are read by event", "按事件读出数字")
def numbers(attempt: Attempt) -> None:
    counters = attempt.read_counters(IDLE)
    close(counters["task-clock"], 298.91)
    close(counters["page-faults"], 9350)
    require(
        len(counters) == 4,
        f"{len(counters)} events of 4",
        f"读出 {len(counters)} 个事件，应为 4 个",
    )


@case("a counter that is not there is not zero", "没有的计数器不是零")
def absent(attempt: Attempt) -> None:
    found = attempt.read_counters(COMPUTING)
    require(
        found.get("cycles", 0) is None,
        "cycles were not counted: None",
        "cycles 没有计数：应为 None",
    )


@case("64 MiB show as page faults", "64 MiB 表现为缺页")
def memory(attempt: Attempt) -> None:
    idle, after = attempt.read_counters(IDLE), attempt.read_counters(MEMORY)
    close(attempt.touched_bytes(after["page-faults"], idle["page-faults"]), 64 << 20, 0.01)


@case("why each run is slower", "每次运行变慢的原因")
def causes(attempt: Attempt) -> None:
    idle = attempt.read_counters(IDLE)
    waiting = {**idle, "context-switches": 2000.0}
    cases = (
        (attempt.read_counters(MEMORY), 0.1, "memory"),
        (attempt.read_counters(COMPUTING), 0.9, "computing"),
        (waiting, 0.5, "waiting"),
        ({**idle, "task-clock": 400.0}, 3.0, "waiting"),
    )
    for after, wall_s, expected in cases:
        cause = attempt.cause(idle, after, wall_s)
        require(cause == expected, f"{cause}, not {expected}", f"{cause}，应为 {expected}")


def counted(program: str) -> str:
    """What perf says about a Python program on this machine."""
    if shutil.which("perf") is None:
        raise NotHere(
            "not looked at: perf is not installed (apt install linux-perf)",
            "未检查：未安装 perf（apt install linux-perf）",
        )
    events = ["perf", "stat", "-x,", "-e", "task-clock,page-faults"]
    command = [*events, sys.executable, "-S", "-c", program]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode or "page-faults" not in process.stderr or "<not" in process.stderr:
        raise NotHere(
            "not looked at: this kernel does not let perf count (see kernel.perf_event_paranoid)",
            "未检查：本机内核不允许 perf 计数（见 kernel.perf_event_paranoid）",
        )
    return process.stderr


def huge_pages() -> bool:
    """Whether memory may come in pages of 2 MiB without being asked for: one fault for 512 pages."""
    file = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return file.is_file() and "[always]" in file.read_text()


@case("64 MiB counted by perf on this machine, now", "此刻在本机用 perf 数出 64 MiB")
def live(attempt: Attempt) -> None:
    idle = attempt.read_counters(counted("pass"))
    touching = counted("x = bytearray(64 << 20); x[::4096] = bytes(len(x[::4096]))")
    after = attempt.read_counters(touching)
    touched = attempt.touched_bytes(after["page-faults"], idle["page-faults"])
    # 64 MiB in huge pages are 32 faults, which count as 128 KiB; a busy allocator makes a few more.
    least = (120 << 10) if huge_pages() else (60 << 20)
    require(
        least < touched < (96 << 20),
        f"{touched / 2**20:.1f} MiB of 64",
        f"64 MiB 数出 {touched / 2**20:.1f} MiB",
    )
