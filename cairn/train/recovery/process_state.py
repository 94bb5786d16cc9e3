"""What the kernel says of a process of this machine. Reads /proc, nothing else."""

from pathlib import Path


def process_state(pid: int) -> str:
    """R, S, D, T ...; empty where the process is not of this machine or is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
