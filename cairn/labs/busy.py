"""Do other programs hold this machine's cores? Two readings of /proc/stat, a moment apart.

A timing that is off on a busy machine says nothing about the lab. Where there is no /proc, the answer is no.
"""

import time
from pathlib import Path

STAT = Path("/proc/stat")
LOOK_S = 0.3
BUSY_SHARE = 0.4  # of all cores; this process sleeps while it looks


def is_busy(look_s: float = LOOK_S) -> bool:
    before = _ticks()
    time.sleep(look_s)
    after = _ticks()
    if before is None or after is None or after[1] <= before[1]:
        return False
    return (after[0] - before[0]) / (after[1] - before[1]) > BUSY_SHARE


def _ticks() -> tuple[int, int] | None:
    """(working, all) ticks of all cores since the machine started."""
    try:
        fields = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = fields[3] + fields[4]  # idle, and waiting for a disk
    return sum(fields) - idle, sum(fields)
