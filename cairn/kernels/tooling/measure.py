"""Is a kernel right, and how fast is it beside its anchors and the ceilings of this GPU?

One `Case` in, one `Row` out. The error comes first: a wrong kernel gets no time. Ours and the anchors are timed in
turns in the same process, because a chip at the limit of its power is slower the longer it has worked; the ceilings
were measured in the same run by the caller. Short cases are replayed from a CUDA graph over several sets of inputs that
together exceed the L2 cache, so that neither the launch nor a warm cache is what is measured. Needs a CUDA device;
prints nothing.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TypeVar

import msgspec

from cairn.core.errors import HardwareError
from cairn.hw import timing
from cairn.hw.ceilings import Measured
from cairn.kernels.kernel import Case, Cost, Prepared

Made = TypeVar("Made")

CACHES = 4  # inputs of a graph exceed the L2 this many times
COPIES = 64  # sets of inputs at most, however small they are
COPYING_S = 2.0  # time to spend on making them
ROUNDS = 3  # in which ours and the anchors take turns


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """Ceilings of this GPU, measured in the same run."""

    device: str
    bytes_per_s: float
    flops_per_s: dict[str, float]  # by dtype

    def floor_s(self, cost: Cost, dtype: str) -> float:
        """The least time; a dtype whose matmul rate is unknown is bound by memory alone."""
        rate = self.flops_per_s.get(dtype, math.inf)
        return max(cost.bytes / self.bytes_per_s, cost.flops / rate)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of benchmarks/h200/kernels.json. `failure` says why a row has no time."""

    kernel: str
    shape: str
    dtype: str
    ms: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    fraction_of_ceiling: float | None = None
    anchor: str | None = None  # the fastest of the anchors
    ratio_to_anchor: float | None = None  # above 1: we are faster than it
    error: float | None = None
    tolerance: float = 0.0
    spread: float | None = None  # width of the middle 80% of the runs, as a share of the median
    anchors_ms: dict[str, float] = {}
    notes: list[str] = []
    failure: str | None = None
    commit: str = ""  # what was measured; rows of several runs can stand in one file


def require_gpu() -> str:
    """The name of the device that kernels will run on."""
    import torch

    if not torch.cuda.is_available():
        raise HardwareError(
            f"measuring kernels needs a CUDA device, and torch {torch.__version__} sees none",
            hint="without a GPU: `cairn kernels check` compiles and lints them for sm_90",
        )
    return torch.cuda.get_device_name()


def measure_ceiling(dtypes: Iterable[str], budget_ms: float = 300.0) -> Ceiling:
    """Copy bandwidth and matmul rates, now and on this device; what is no dtype of a matmul is left out."""
    from cairn.hw.datasheet import DTYPES
    from cairn.hw.measure_device import Unmeasurable, copy_rate, matmul_rate

    chosen = set(dtypes)
    rates: dict[str, Measured] = {}
    for dtype in DTYPES:
        if dtype not in chosen:
            continue
        try:
            rates[dtype] = matmul_rate("cuda", dtype, budget_ms)
        except (Unmeasurable, RuntimeError):  # this GPU, or this torch, cannot
            continue
    return Ceiling(
        device=require_gpu(),
        bytes_per_s=copy_rate("cuda", 1 << 30, budget_ms).value,
        flops_per_s={dtype: rate.value for dtype, rate in rates.items()},
    )


def measure_case(case: Case, ceiling: Ceiling, budget_ms: float = 100.0) -> Row:
    """A failure becomes a row that says so: a table goes on after it."""
    blank = Row(kernel=case.kernel, shape=case.shape, dtype=case.dtype, tolerance=case.tolerance)
    try:
        prepared = case.prepare()
        error = float(prepared.error())
    except Exception as problem:  # noqa: BLE001  whatever a kernel raises belongs into its row
        return msgspec.structs.replace(blank, failure=first_line(problem))
    blank = msgspec.structs.replace(blank, error=error if math.isfinite(error) else None)
    if not error <= case.tolerance:  # NaN is wrong, too
        return msgspec.structs.replace(
            blank, failure=f"error {error:.3g} exceeds {case.tolerance:.3g}"
        )
    try:
        return _timed(case, prepared, ceiling, blank, budget_ms)
    except Exception as problem:  # noqa: BLE001
        return msgspec.structs.replace(blank, failure=first_line(problem))


def _timed(case: Case, first: Prepared, ceiling: Ceiling, blank: Row, budget_ms: float) -> Row:
    sets = rotation(case.prepare, first, case.cost.bytes) if case.graph else [first]
    rounds = 1 if case.graph else ROUNDS  # a capture takes longer than what it would tell
    ours: list[timing.CallTiming] = []
    anchors: dict[str, list[float]] = {name: [] for name in first.anchors}
    notes = []
    for _ in range(rounds):
        ours.append(_time(case, [p.ours for p in sets], budget_ms / rounds))
        for name in list(anchors):
            try:
                taken = _time(case, [p.anchors[name] for p in sets], budget_ms / rounds)
                anchors[name].append(taken.median_s)
            except Exception as problem:  # noqa: BLE001  an anchor that cannot run here is no news about ours
                notes.append(f"{name} did not run: {first_line(problem)}")
                del anchors[name]
    middle = sorted(ours, key=lambda taken: taken.median_s)[rounds // 2]
    return _row(case, ceiling, blank, middle, {n: median(s) for n, s in anchors.items()}, notes)


def _row(
    case: Case,
    ceiling: Ceiling,
    blank: Row,
    ours: timing.CallTiming,
    anchors: dict[str, float],
    notes: list[str],
) -> Row:
    best = min(anchors, key=lambda name: anchors[name], default=None)
    seconds = ours.median_s
    return msgspec.structs.replace(
        blank,
        ms=seconds * 1e3,
        tflops=case.cost.flops / seconds / 1e12,
        gbps=case.cost.bytes / seconds / 1e9,
        fraction_of_ceiling=ceiling.floor_s(case.cost, case.dtype) / seconds,
        anchor=best,
        ratio_to_anchor=anchors[best] / seconds if best else None,
        spread=ours.spread,
        anchors_ms={name: value * 1e3 for name, value in anchors.items()},
        notes=notes,
    )


def _time(case: Case, calls: list[Callable[[], object]], budget_ms: float) -> timing.CallTiming:
    if not case.graph:
        return timing.measure(calls[0], device="cuda", budget_ms=budget_ms)
    return replayed(calls, budget_ms)


def rotation(make: Callable[[], Made], first: Made, size_bytes: float) -> list[Made]:
    """Enough sets of inputs that none of them is still in the cache when its turn comes again."""
    import torch

    properties = torch.cuda.get_device_properties("cuda")
    copies = math.ceil(CACHES * properties.L2_cache_size / max(size_bytes, 1.0))
    began = time.perf_counter()
    sets = [first]
    while len(sets) < min(copies, COPIES) and time.perf_counter() - began < COPYING_S:
        free, total = torch.cuda.mem_get_info()
        if free < total // 4:
            break
        sets.append(make())
        torch.cuda.synchronize()
    return sets


def replayed(calls: Sequence[Callable[[], object]], budget_ms: float) -> timing.CallTiming:
    """Time per call when they are replayed from one graph, taking turns."""
    return timing.measure_graph(
        lambda call: call(),
        [(call,) for call in calls],
        device="cuda",
        calls=max(1, 50 // len(calls)) * len(calls),
        budget_ms=budget_ms,
    )


def first_line(problem: Exception) -> str:
    text = str(problem).strip().partition("\n")[0]
    return f"{type(problem).__name__}: {text}"[:300]
