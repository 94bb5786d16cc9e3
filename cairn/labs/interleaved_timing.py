"""Seconds of several calls, taken in turn: whatever else the machine does meets all of them alike."""

import time
from collections.abc import Callable


def fastest_in_turn(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """The least seconds of each call; for work on the CPU that is done when the call returns."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for number, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[number] = min(best[number], time.perf_counter() - start)
    return best
