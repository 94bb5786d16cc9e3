"""Profile of kernels over a few steps: counts and times, of kernels on a GPU and of torch operations on a CPU.

Uses torch's profiler for the length of a window and no longer: it slows down what it looks at, which is why times of
steps come from runs without it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cairn.core.records import Process, Record, Span, Thread, encode, read

if TYPE_CHECKING:
    import torch

    from cairn.serve.engine.loop import Engine


class KernelLine(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    calls: int
    total_ms: float
    share: float  # of all kernels of the window


class ProfileWindow(NamedTuple):
    steps: int
    kernels: list[KernelLine]  # the most expensive first
    ran: list[tuple[str, int, int, int]]  # name, start and duration in ns of the wall clock, stream

    def busy_s(self) -> float:
        """Time in which any kernel ran; overlapping kernels and streams count once."""
        total = ended = 0
        for start, end in sorted((start, start + duration) for _, start, duration, _ in self.ran):
            total += max(0, end - max(start, ended))
            ended = max(ended, end)
        return total / 1e9


def profiled(
    engine: "Engine", device: "torch.device", most: int, go_on: Callable[[], bool]
) -> ProfileWindow:
    """Up to `most` steps, as long as there is work and `go_on` says so."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    steps = 0
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as watch:
        while steps < most and engine.has_work and go_on():
            engine.step()
            steps += 1
        if on_gpu:
            import torch

            torch.cuda.synchronize(device)
    return ProfileWindow(steps, _lines(watch, on_gpu), _ran(watch, on_gpu))


def profiled_calls(call: Callable[[], object], device: "torch.device", times: int) -> ProfileWindow:
    """The same for something that is called: a training step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as watch:
        for _ in range(times):
            call()
        if on_gpu:
            torch.cuda.synchronize(device)
    return ProfileWindow(times, _lines(watch, on_gpu), _ran(watch, on_gpu))


def _lines(watch: Any, on_gpu: bool) -> list[KernelLine]:
    rows = []
    for row in watch.key_averages():
        micros = row.self_device_time_total if on_gpu else row.self_cpu_time_total
        if micros > 0 and row.key != "ProfilerStep*":
            rows.append((row.key, row.count, micros / 1e3))
    total = sum(ms for _, _, ms in rows) or 1.0
    rows.sort(key=lambda row: -row[2])
    return [KernelLine(name=n, calls=c, total_ms=ms, share=ms / total) for n, c, ms in rows]


def _ran(watch: Any, on_gpu: bool) -> list[tuple[str, int, int, int]]:
    """Each kernel on its own, for a timeline."""
    results = watch.profiler.kineto_results if watch.profiler is not None else None
    if results is None:
        return []
    kind = "CUDA" if on_gpu else "CPU"
    return [
        (event.name(), event.start_ns(), event.duration_ns(), event.device_resource_id())
        for event in results.events()
        if event.device_type().name == kind and event.duration_ns() > 0
    ]


def device_spans(host: Path, out: Path, windows: list[ProfileWindow]) -> None:
    """The kernels as an event file beside that of the host, on the same clock."""
    process = next(read(host))
    assert isinstance(process, Process)  # read has checked it
    to_monotonic = process.monotonic_ns - process.wall_ns
    records: list[Record] = [msgspec.structs.replace(process, name="kernels")]
    streams: set[int] = set()
    for window in windows:
        for name, start_ns, duration_ns, stream in window.ran:
            if stream not in streams:
                streams.add(stream)
                records.append(Thread(stream, f"stream {stream}"))
            records.append(Span(name, start_ns + to_monotonic, duration_ns, stream))
    out.write_bytes(b"".join(map(encode, records)))
