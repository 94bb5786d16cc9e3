"""Is this machine as fast now as it was a moment ago? A fixed piece of work is timed again and again.

    pace()  ──>  Pace(compute_s, memory_s)  ──lab runs──>  pace()  ──>  has_moved([first, second])

/proc/stat shows who holds the cores; it does not show a neighbour behind the hypervisor, a clock that fell, or memory
bandwidth that another process takes. The work here is the same each time, so that only the machine can change its time.
Knows no lab and no verdict.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

ADDITIONS = 200_000
COPIED_BYTES = 8 << 20
TIMES = 3  # of each; their sum is taken, since being interrupted is what is looked for
MOVED = 1.25  # slowest over fastest; on an idle machine 1.1


class Pace(NamedTuple):
    compute_s: float
    memory_s: float


def pace() -> Pace:
    """About 30 ms of work on one core."""
    source, target = bytearray(COPIED_BYTES), bytearray(COPIED_BYTES)

    def copy() -> None:
        target[:] = source

    copy()  # the pages are there from now on
    return Pace(_seconds(lambda: sum(range(ADDITIONS))), _seconds(copy))


def has_moved(paces: Sequence[Pace]) -> bool:
    """Whether one of these was slower than another by more than an idle machine ever shows."""
    return any(max(kind) > MOVED * min(kind) for kind in zip(*paces, strict=True))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(TIMES):
        work()
    return time.perf_counter() - began
