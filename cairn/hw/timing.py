"""Timing of a call.

    measure         one call after another: events on a GPU, the clock on a CPU
    measure_graph   the same calls replayed from one CUDA graph, without launches from Python

Both warm up first, repeat until a time budget is spent, and report the median with its spread. On
a GPU a large buffer is written between two runs, so that a run cannot find its inputs in the L2
cache; on a CPU nothing is flushed, and several `inputs` do that job. Knows nothing about what the
call computes.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cairn.core.errors import HardwareError
from cairn.core.garbage_collection import held_collector

Call = Callable[..., object]
Arguments = tuple[Any, ...]
Sampler = Callable[[int], list[float]]  # how many runs -> seconds of each

# Four times the L2: enough to push everything out, and long enough (about 70 us on an H200) for
# Python to queue the next launch behind it, so that the events do not enclose a gap.
FLUSH_FACTOR = 4
SMALLEST_FLUSH_BYTES = 64 << 20


class CallTiming(msgspec.Struct, frozen=True, kw_only=True):
    median_s: float
    p10_s: float
    p90_s: float
    runs: int

    @property
    def spread(self) -> float:
        """Width of the middle 80% of the runs, as a share of the median: the noise to beat."""
        return (self.p90_s - self.p10_s) / self.median_s if self.median_s else 0.0

    def per(self, count: float) -> "CallTiming":
        """The time of one of `count` equal parts of the call."""
        return CallTiming(
            median_s=self.median_s / count,
            p10_s=self.p10_s / count,
            p90_s=self.p90_s / count,
            runs=self.runs,
        )


def summarize(samples_s: Sequence[float]) -> CallTiming:
    ordered = sorted(samples_s)
    return CallTiming(
        median_s=statistics.median(ordered),
        p10_s=_quantile(ordered, 0.1),
        p90_s=_quantile(ordered, 0.9),
        runs=len(ordered),
    )


def repeats(one_s: float, budget_s: float, at_least: int, at_most: int) -> int:
    """Number of runs of `one_s` that fit into the budget, within bounds."""
    fitting = at_most if one_s <= 0 else int(min(budget_s / one_s, at_most))
    return max(at_least, min(fitting, at_most))


def measure(
    call: Call,
    inputs: Sequence[Arguments] = ((),),
    *,
    device: str = "cpu",
    budget_ms: float = 100.0,
    flush: bool = True,
    at_least: int = 5,
    at_most: int = 1000,
) -> CallTiming:
    """Time `call(*inputs[i])`, taking the inputs in turn. `device` is where the work runs."""
    if device.startswith("cuda"):
        sample = _cuda_sampler(call, inputs, device, flush)
    else:
        sample = _clock_sampler(call, inputs)
    return _measure(sample, budget_ms / 1000, at_least, at_most)


def measure_graph(
    call: Call,
    inputs: Sequence[Arguments] = ((),),
    *,
    device: str = "cuda",
    calls: int = 100,
    budget_ms: float = 100.0,
    at_least: int = 5,
    at_most: int = 1000,
) -> CallTiming:
    """Time per call when `calls` of them are one CUDA graph; for work shorter than its launch."""
    replay = _capture(call, inputs, device, calls)
    sample = _cuda_sampler(replay, ((),), device, flush=False)
    return _measure(sample, budget_ms / 1000, at_least, at_most).per(calls)


def _measure(sample: Sampler, budget_s: float, at_least: int, at_most: int) -> CallTiming:
    sample(1)  # compiles, loads modules, creates handles
    one_s = statistics.median(sample(3))
    sample(repeats(one_s, budget_s / 4, 1, at_most))  # clocks and caches settle
    return summarize(sample(repeats(one_s, budget_s, at_least, at_most)))


def _clock_sampler(call: Call, inputs: Sequence[Arguments]) -> Sampler:
    def sample(runs: int) -> list[float]:
        seconds = []
        for run in range(runs):
            arguments = inputs[run % len(inputs)]
            start = time.perf_counter()
            call(*arguments)
            seconds.append(time.perf_counter() - start)
        return seconds

    return sample


def _cuda_sampler(call: Call, inputs: Sequence[Arguments], device: str, flush: bool) -> Sampler:
    torch = _torch_with_cuda()
    scratch = _flush_buffer(device) if flush else None

    def sample(runs: int) -> list[float]:
        with torch.cuda.device(device):
            events = [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                for _ in range(runs)
            ]
            for run, (start, end) in enumerate(events):
                if scratch is not None:
                    scratch.zero_()
                start.record()
                call(*inputs[run % len(inputs)])
                end.record()
            torch.cuda.synchronize()
            return [start.elapsed_time(end) / 1000 for start, end in events]

    return sample


def _capture(call: Call, inputs: Sequence[Arguments], device: str, calls: int) -> Call:
    torch = _torch_with_cuda()
    with torch.cuda.device(device):
        # Libraries allocate workspaces on their first calls, which a capture would forbid.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for arguments in inputs:
                call(*arguments)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with held_collector(), torch.cuda.graph(graph):
            for number in range(calls):
                call(*inputs[number % len(inputs)])
    return graph.replay


def _flush_buffer(device: str) -> Any:
    torch = _torch_with_cuda()
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    size = max(FLUSH_FACTOR * l2_bytes, SMALLEST_FLUSH_BYTES)
    return torch.empty(size, dtype=torch.int8, device=device)


def _torch_with_cuda() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise HardwareError(
            f"torch {torch.__version__} sees no CUDA device to time on",
            hint='measure with device="cpu", or run `cairn doctor` to see what is missing',
        )
    return torch


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest runs."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
