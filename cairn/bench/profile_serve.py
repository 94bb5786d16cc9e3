"""Profile of serving steps: the time of each part and its distance from the floor.

    run 1   the whole workload, as `throughput` runs it   -> the ledger: parts of a step beside their floors
    run 2   a few steps under torch's profiler            -> the table of kernels (operations, on a CPU)
    both    spans of the host, kernels of the device      -> one timeline for Perfetto

Steps are of two kinds, because their floors differ: those that only decode, and those with some prefill in them. The
floor of a step is what its tokens have to read and compute at the measured ceilings; parts of the host have the floor
zero, since the device can hide them. Prints nothing.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from cairn.bench.engine_run import serve, submit
from cairn.bench.profiled_kernels import KernelLine, ProfileWindow, device_spans, profiled
from cairn.bench.throughput import WARM_TOKENS, ThroughputBench, captures_more, choose_requests
from cairn.bench.workload import WorkloadRequest
from cairn.core import events
from cairn.core.trace import TraceSummary, write_trace
from cairn.models.step_cost import SequenceWork, step_cost
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.step import Chunk, Step
from cairn.serve.engine.step_times import StepTimes

HOST_PARTS = ("schedule", "launch", "wait", "update")
Ran = Callable[[str], None]


class ServeStepPart(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one part of the steps of a type, in milliseconds."""

    part: str
    median_ms: float
    p90_ms: float
    share: float  # of the step
    floor_ms: float


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    kind: str  # "decode" or "prefill"
    steps: int
    sequences: float  # of the median step
    tokens: float
    parts: list[ServeStepPart]
    window: int = 0  # steps that the kernels were counted in
    kernels: list[KernelLine] = []


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    shape: str
    workload: str
    dtype: str
    device: str
    seconds: float
    steps: int
    overlapped: bool
    ledgers: list[StepProfile]
    notes: list[str]
    trace: TraceSummary | None = None


class WatchedStep(Scheduler):
    """A scheduler that remembers what it decided; what that costs is worked out when the run is over."""

    def __init__(self, of: Scheduler) -> None:
        super().__init__(of.limits, prefix_caching=of.blocks.prefix.enabled)
        self.decided: list[Step] = []

    def schedule(self) -> Step:
        step = super().schedule()
        self.decided.append(step)
        return step


class ProfiledStep(NamedTuple):
    """A measured step: its chunks and its times."""

    chunks: list[Chunk]
    times: StepTimes
    wall_s: float  # from the end of the step before to its own end

    @property
    def kind(self) -> str:
        return "decode" if all(chunk.count == 1 for chunk in self.chunks) else "prefill"


def profile(bench: ThroughputBench, name: str, window: int, out: Path | None, ran: Ran) -> Profile:
    """Both runs; with `out`, also the timeline."""
    chosen, notes = choose_requests(name, bench.scale, bench.spec, bench.context)
    scheduler = WatchedStep(bench.engine.scheduler)
    engine = Engine(scheduler, bench.engine.runner, overlap=bench.engine.overlap)
    short = [one._replace(output=min(one.output, WARM_TOKENS)) for one in chosen]
    serve(engine, short)
    if captures_more(engine):  # else the run that is timed would
        serve(engine, short)
    ran("warm-up")
    with _recorded(out) as recorded:
        scheduler.decided.clear()
        run = serve(engine, chosen)
        seen = _seen(scheduler.decided, run.times)
        ran("ledger")
        windows = _kernel_windows(engine, chosen, window)
        ran("kernels")
        events.close()
        summary = recorded(windows)
    notes += [run.failure] if run.failure else []
    return Profile(
        shape=bench.setup.shape,
        workload=name,
        dtype=bench.dtype,
        device=bench.ceiling.device,
        seconds=run.seconds,
        steps=run.steps,
        overlapped=engine.overlap,
        ledgers=[
            made for kind in ("prefill", "decode") if (made := _ledger(bench, kind, seen, windows))
        ],
        notes=notes,
        trace=summary,
    )


def _seen(decided: Sequence[Step], times: Sequence[StepTimes]) -> list[ProfiledStep]:
    """Steps with chunks. The first has nothing before it to be measured from: its parts are all it took."""
    chunks = {step.number: step.chunks for step in decided}
    first = times[0]
    began = first.ended - sum(getattr(first, part) for part in HOST_PARTS)
    ends = [began, *(step.ended for step in times)]
    return [
        ProfiledStep(chunks[step.number], step, step.ended - before)
        for before, step in zip(ends, times, strict=False)
        if chunks[step.number]
    ]


def _ledger(
    bench: ThroughputBench,
    kind: str,
    seen: Sequence[ProfiledStep],
    windows: dict[str, ProfileWindow],
) -> StepProfile | None:
    mine = [step for step in seen if step.kind == kind]
    if not mine:
        return None
    floors = [floor_s(bench, step.chunks) for step in mine]
    window = windows.get(kind)
    on_gpu = bench.engine.runner.device.type == "cuda"
    samples = {part: [getattr(step.times, part) for step in mine] for part in HOST_PARTS}
    if on_gpu and window is not None and window.steps:
        samples["device"] = [window.busy_s() / window.steps]
    samples["step"] = [step.wall_s for step in mine]
    whole = statistics.median(samples["step"])
    # On a CPU the device is the host, and computes while it launches.
    floored = ("step", "device") if on_gpu else ("step", "launch")
    floor_ms = 1e3 * statistics.median(floors)
    return StepProfile(
        kind=kind,
        steps=len(mine),
        sequences=statistics.median(len(step.chunks) for step in mine),
        tokens=statistics.median(step.times.tokens for step in mine),
        parts=[
            _part(name, values, whole, floor_ms if name in floored else 0.0)
            for name, values in samples.items()
        ],
        window=window.steps if window else 0,
        kernels=window.kernels if window else [],
    )


def _part(name: str, samples: Sequence[float], whole: float, floor_ms: float) -> ServeStepPart:
    ordered = sorted(samples)
    median = statistics.median(ordered)
    return ServeStepPart(
        part=name,
        median_ms=1e3 * median,
        p90_ms=1e3 * ordered[math.ceil(0.9 * (len(ordered) - 1))],
        share=median / whole if whole else 0.0,
        floor_ms=floor_ms,
    )


def floor_s(bench: ThroughputBench, chunks: Sequence[Chunk]) -> float:
    """Minimum time of a step with these chunks at the ceilings of this machine."""
    work = [SequenceWork(chunk.count, chunk.start, chunk.samples) for chunk in chunks]
    return bench.ceiling.floor_s(step_cost(bench.spec, work, *reversed(bench.each)), bench.rate)


def _kernel_windows(
    engine: Engine, chosen: Sequence[WorkloadRequest], window: int
) -> dict[str, ProfileWindow]:
    """The first steps, which prefill, and some later ones in which all requests decode."""
    engine.scheduler.blocks.reset()
    added = submit(engine, chosen)
    windows: dict[str, ProfileWindow] = {}
    device = engine.runner.device

    def prefilling() -> bool:
        return any(not request.outputs for request in added if request.state != "finished")

    windows["prefill"] = profiled(engine, device, window, prefilling)
    while engine.has_work and prefilling():
        engine.step()
    windows["decode"] = profiled(engine, device, window, lambda: True)
    for request in added:
        engine.abort(request.id)
    engine.run()
    return windows


Finish = Callable[[dict[str, ProfileWindow]], TraceSummary | None]


@contextmanager
def _recorded(out: Path | None) -> Iterator[Finish]:
    """Spans of the host go to a file until the caller is done; then they and the kernels become one timeline."""
    if out is None or events.listening():  # then CAIRN_EVENTS is set, and `cairn trace` draws them
        yield lambda windows: None
        return
    with TemporaryDirectory(prefix="cairn-profile-") as folder:
        host, device = Path(folder) / "host.jsonl", Path(folder) / "device.jsonl"
        events.listen(host, name="cairn profile serve")

        def finish(windows: dict[str, ProfileWindow]) -> TraceSummary:
            device_spans(host, device, list(windows.values()))
            return write_trace([host, device], out)

        yield finish
