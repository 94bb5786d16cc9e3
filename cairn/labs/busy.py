"""Was this machine disturbed while a lab ran? By the cores that others held, and by the pace of a fixed piece of work.

    before = reading()  ──lab runs──>  is_busy(before)     all work less that of this process and its children
    watch.begin()  ──lab runs──>  watch.look()  ──once more──>  watch.was_disturbed()       that, or the pace moved

A timing that is off on a busy machine says nothing about the lab. A load that has just begun, or ends with the lab, is
seen as well: the share is that of the whole run. Time that a hypervisor took counts as others'. Where there is no
/proc, the pace alone answers.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

from cairn.labs.pace import Pace, has_moved, pace

STAT = Path("/proc/stat")
LOOK_S = 0.3  # where nothing was read before
BUSY_SHARE = 0.2  # of all cores: on two, less than half of one


class Reading(NamedTuple):
    working: float  # seconds of all cores since the machine started
    total: float
    own: float  # of this process and of its children that have ended


def reading() -> Reading | None:
    try:
        fields = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    idle = fields[3] + fields[4]  # idle, and waiting for a disk
    return Reading((sum(fields) - idle) / tick, sum(fields) / tick, sum(os.times()[:4]))


def is_busy(before: Reading | None = None) -> bool:
    """Whether others held more than `BUSY_SHARE` of the cores since `before`, or in a moment from now."""
    if before is None:
        before = reading()
        time.sleep(LOOK_S)
    after = reading()
    return before is not None and after is not None and others_share(before, after) > BUSY_SHARE


def others_share(before: Reading, after: Reading) -> float:
    """Of all cores' time between two readings, what neither this process nor its children worked."""
    working, total, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, working - own) / total if total > 0 else 0.0


class Watch:
    """Looks at the machine around the runs of a lab; the best pace of all labs so far is what each is held against."""

    def __init__(self) -> None:
        self._best: list[Pace] = []  # one, or none yet
        self._seen: list[Pace] = []
        self._before: Reading | None = None

    def begin(self) -> None:
        """Before a lab."""
        self._seen = []
        self._before = reading()
        self.look()

    def look(self) -> None:
        now = pace()
        self._seen.append(now)
        self._best = [Pace(*map(min, *self._best, now))] if self._best else [now]

    def was_disturbed(self) -> bool:
        """Whether others held the cores since `begin`, or any look of this lab was slower than the best of all."""
        self.look()
        return has_moved([*self._best, *self._seen]) or is_busy(self._before)
