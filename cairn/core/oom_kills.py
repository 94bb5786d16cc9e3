"""Number of OOM kills in this process's control group, read from files.

A process that is ended for memory gets SIGKILL like any other: only this number tells the two apart. Both versions of
control groups; 0 where the kernel does not say.
"""

import re
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def oom_kills(own: Path = OWN, root: Path = ROOT) -> int:
    """So far. For one process, compare before and after."""
    for path in counters(own, root):
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def counters(own: Path, root: Path) -> list[Path]:
    """Candidate files for the counter, the own group first; inside a container it is often in the root group."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            top, name = root, "memory.events"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.oom_control"
        else:
            continue
        found += [top / group.lstrip("/") / name, top / name]
    return found
