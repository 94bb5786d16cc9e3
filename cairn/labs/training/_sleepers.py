"""Runs a pipeline schedule in real time with stages that sleep instead of computing: one thread for each rank.

The same lists of actions that the trainer's executor runs and the simulator times. Sleeping needs no core, so even a
small machine shows the timeline of many ranks. Knows no lab.
"""

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cairn.train.parallel.pipeline.actions import Schedule
    from cairn.train.parallel.pipeline.simulate import Costs


def idle_share(
    schedule: "Schedule", costs: "Costs", unit_s: float, timeout_s: float = 20.0
) -> float:
    """The share of all ranks' time that is idle, from the first start to the last end."""
    from cairn.train.parallel.pipeline.simulate import needs

    finished: set[tuple[str, int, int]] = set()
    changed = threading.Condition()
    busy = [0.0] * schedule.size
    deadline = time.monotonic() + timeout_s

    def one_rank(rank: int) -> None:
        for action in schedule.ranks[rank]:
            needed = set(needs(schedule, rank, action))
            with changed:
                while not needed <= finished:
                    if not changed.wait(max(0.0, deadline - time.monotonic())):
                        return
            began = time.perf_counter()
            time.sleep(costs.of(action.kind, schedule.chunks) * unit_s)
            busy[rank] += time.perf_counter() - began
            kind = "I" if action.kind == "B" else action.kind
            with changed:
                finished.add((kind, schedule.stage_of(rank, action.chunk), action.microbatch))
                changed.notify_all()

    threads = [
        threading.Thread(target=one_rank, args=(rank,), daemon=True)
        for rank in range(schedule.size)
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    span = time.perf_counter() - began
    return 1 - sum(busy) / (span * schedule.size)
