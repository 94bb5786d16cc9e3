"""Types of `cairn comm bench`: the specification of a measurement and its rows."""

from typing import Literal

import msgspec
import numpy as np

from cairn.comm.bench_operations import Operation


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    operation: Operation
    backends: list[str]
    sizes: list[int]  # bytes
    type: str = "float"
    reduction: str = "sum"
    root: int = 0
    iterations: int = 20
    warmup: int = 5
    check: bool = True
    timeout_s: float = 60.0
    together: int = 1  # calls that are timed as one, and their time shared out (-m)
    of_ranks: Literal["first", "mean", "least", "most"] = "most"  # whose time an iteration has (-a)
    cpu_time: bool = False  # of the process, instead of the clock's (-C)
    store: str = ""  # a file in which the ranks find each other


class BenchTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of every iteration, each by its slowest rank (`of_ranks`)."""

    times_us: list[float]
    wrong: int | None  # elements, of all ranks; None: not looked at

    @property
    def mean_us(self) -> float:
        return float(np.mean(self.times_us))

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.times_us, share))


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    type: str
    reduction: str
    size: int
    count: int
    out_of_place: BenchTiming
    in_place: BenchTiming | None  # None: the operation has no such form
    at: str = ""  # when it was done
