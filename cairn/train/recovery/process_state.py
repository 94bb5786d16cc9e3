"""State of a local process from /proc."""

import signal
from pathlib import Path

EXITING = 0x4  # PF_EXITING of the kernel, among the flags of a process
STATE, FLAGS = 0, 6  # places behind the name in /proc/PID/stat


def process_state(pid: int) -> str:
    """R, S, D, T ...; empty where the process is not of this machine or is gone."""
    try:
        return _stat(pid)[STATE]
    except (OSError, IndexError):
        return ""


def is_ending(pid: int) -> bool:
    """Gone, or killed and not gone yet: on a busy machine a process with much memory takes a while to end."""
    try:
        stat = _stat(pid)
        return stat[STATE] in "ZX" or bool(int(stat[FLAGS]) & EXITING) or _was_killed(pid)
    except (OSError, IndexError):
        return True


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _was_killed(pid: int) -> bool:
    """SIGKILL waits for the process to run once more."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)
