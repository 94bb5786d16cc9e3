"""Number of CPU threads: as many as the container may use, which torch does not respect.

A quota of two CPUs on a machine of 64 stops all 64 threads of a product for most of every period. A user who sets
OMP_NUM_THREADS has decided for himself.

Small products run on one thread. Others hardly make them faster, and on a machine that others use each product waits
for the thread that is not running: cairn-tiny answered 3 to 8 times as slowly with two threads as with one.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from cairn.hw.host import read_cpu

ONE_THREAD_FLOPS = 8e6  # of a product; about a millisecond on one core
SMALL = (
    2**19
)  # elements of a matrix: larger ones are not in a core's cache, and reading them takes several


def few_tokens(matrices: Sequence[int]) -> int:
    """Largest step in tokens that one thread computes, by the mean number of elements of the matrices."""
    mean = sum(matrices) / max(len(matrices), 1)
    return int(ONE_THREAD_FLOPS / (2 * mean)) if 0 < mean <= SMALL else 0


def allowed_threads(usable: int | None, quota: float | None, now: int) -> int:
    """No more than now, than the process may run on, and than whole CPUs of the quota."""
    limits = [now, *([usable] if usable else []), *([math.floor(quota)] if quota else [])]
    return max(1, min(limits))


@contextmanager
def one_thread(where_at_most: int | None = None) -> Iterator[None]:
    """torch computes on one thread; with `where_at_most` only if it has no more than so many otherwise."""
    before = torch.get_num_threads()
    if where_at_most is not None and before > where_at_most:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def limit_threads(root: Path = Path("/")) -> str | None:
    """Lowers torch's threads, whose number the compiled kernels take over; says so."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    cpu, now = read_cpu(root), torch.get_num_threads()
    allowed = allowed_threads(cpu.usable_threads, cpu.quota, now)
    if allowed == now:
        return None
    torch.set_num_threads(allowed)
    quota = "no quota" if cpu.quota is None else f"a quota of {cpu.quota:g} CPUs"
    return f"{allowed} threads instead of {now}: {cpu.usable_threads} CPUs are usable, with {quota}"
