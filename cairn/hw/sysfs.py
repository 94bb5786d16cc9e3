"""Reads one small file of /proc or /sys.

Each reader answers None for a file that is missing, unreadable or of another form: on a strange
kernel that is an everyday case. Nothing here knows what the values mean.
"""

import re
from pathlib import Path


def read_text(path: Path) -> str | None:
    """The content without its final newline. Some files exist and still refuse to be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def read_node(path: Path) -> int | None:
    """A NUMA node number; the kernel writes -1 where there is none."""
    node = read_int(path)
    return node if node is not None and node >= 0 else None


def parse_range_list(text: str) -> list[int]:
    """`0-3,8` is 0 1 2 3 8, the way the kernel lists CPUs."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is not None:
            numbers.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return numbers


def parse_size(text: str) -> int | None:
    """`32K` or `1024 kB` in bytes: both mean 1024."""
    match = re.match(r"(\d+)\s*([KMG]?)", text.strip(), re.IGNORECASE)
    if match is None:
        return None
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]
