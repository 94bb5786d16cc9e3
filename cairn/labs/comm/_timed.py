"""How long does a collective take between ranks? Timed on every rank, with all of them starting together.

Best of several: whatever else this machine does only adds time. Runs inside a rank, knows no lab.
"""

import time
from collections.abc import Callable


def times_us(call: Callable[[], object], repeats: int) -> list[float]:
    """Microseconds of each call on this rank; two calls before that are not counted."""
    import torch.distributed as dist

    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return times


def slowest_us(per_rank: list[list[float]]) -> list[float]:
    """A collective has taken as long as its slowest rank."""
    return [max(times) for times in zip(*per_rank, strict=True)]
