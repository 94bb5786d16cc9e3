"""Offline throughput of the engine, and its upper bound.

    open model -> ceilings of this machine -> engine [-> first run] -> warm-up -> runs of each workload -> Row -> JSON

A run begins with an idle engine and ends with the last token of the last request on the host. Between runs the prefix
cache is emptied, so that only what a workload shares within itself is found; during a run Python's garbage collector
rests. The first run of a fresh engine is what a user gets who has just started it: with `cold` it stands beside the
others. The requests are those of `workload`, sampled at temperature 0.6 where they do not say. Prints nothing.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from cairn.bench import record
from cairn.bench.engine_run import EngineRun, serve
from cairn.bench.limit import Bytes, Limit, device_name, limit, measure_ceiling
from cairn.bench.record import RecordOrigin, merged
from cairn.bench.workload import (
    CPU_SCALE,
    LARGEST_TOKEN,
    WorkloadRequest,
    WorkloadTotals,
    requests,
    totals,
)
from cairn.core.errors import UsageError
from cairn.hw.roofline import dtype_name
from cairn.kernels.tooling.measure import Ceiling

if TYPE_CHECKING:
    from cairn.models.spec import ModelSpec
    from cairn.models.transformer import Transformer
    from cairn.serve.engine.loop import Engine
    from cairn.serve.engine.step_times import StepTimes

CONTEXT = 4096  # tokens of the longest request, as nano-vllm's benchmark sets it, unless a workload has longer ones
CUT = ("long",)  # workloads whose prompts are cut to the context of the model
WARM_TOKENS = 8  # of each answer in the run before the first that counts
WARM_RUNS = 2  # the engine captures a prefill shape when it comes up for the second time

Ran = Callable[[str], None]  # a run has ended; what it was


class StepHostTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Host time of the median step of the best run by phase, in milliseconds."""

    schedule_ms: float
    launch_ms: float
    wait_ms: float  # for the device
    update_ms: float


class ThroughputRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of benchmarks/h200/throughput.json. `failure` says why a row has no time."""

    shape: str
    workload: str
    dtype: str
    output_tokens_per_s: float | None = None
    input_tokens_per_s: float | None = None
    seconds: float | None = None  # of the best run
    median_seconds: float | None = None
    first_seconds: float | None = None  # of the first run of a fresh engine
    first_of_warm: float | None = None  # its speed, as a share of the best run's
    ready_seconds: float | None = None  # from the open model to an engine that takes requests
    fraction_of_limit: float | None = None
    limit_seconds: float = 0.0
    limited_by: str = ""  # memory or compute
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    repeats: int = 0
    steps: int = 0
    ledger: StepHostTimes | None = None
    scale: float = 1.0  # below 1: fewer and shorter requests than the workload's definition
    plain: bool = False  # no overlap, no graphs, no fused kernels
    threads: int | None = None  # of torch, where the device is the CPU
    quantization: str = ""  # form of the weights, if they are not in the type
    kv_cache: str = ""
    head: str = ""
    weight_bytes: float | None = None  # of one weight on average: the limit counts these
    speculate: str = ""  # the drafter; "": none
    draft_tokens: int = 0  # most of a request in a step
    synthetic_acceptance: list[float] = []  # by position, where drafts hold by chance
    acceptance_length: float | None = None  # tokens of a step that verifies, of a request
    notes: list[str] = []
    failure: str | None = None
    commit: str = ""


class ThroughputReport(RecordOrigin, frozen=True, kw_only=True):
    """benchmarks/h200/throughput.json."""

    ceilings: dict[str, Ceiling]  # of the last run, by whose matmul rate counts: a dtype, or fp8
    rows: list[ThroughputRow]


class ThroughputSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Model and options under test."""

    shape: str  # a preset, or the name of a model with weights
    model: str  # what the engine opens
    device: str = "auto"
    dtype: str = "auto"
    plain: bool = False
    scale: float | None = None  # None: 1 on a GPU, CPU_SCALE on a CPU
    quantization: str = ""  # of weights that are loaded or random in floating point; "" as they are
    kv_cache: str = ""
    head: str = ""
    speculate: str = ""
    draft_tokens: int | Literal["auto"] = "auto"
    synthetic_acceptance: str = ""
    max_num_seqs: int | None = None  # as the engine has it
    repeats: int = 3
    cold: bool = False  # measure the first run, too; an engine then serves one workload
    workloads: list[str] = []  # that its engine is made for
    # Of its longest request, in place of the workloads'; stretches the model.
    context: int | None = None


class ThroughputBench(NamedTuple):
    """An engine that is ready, and what its machine can do."""

    setup: ThroughputSetup
    engine: "Engine"
    spec: "ModelSpec"
    ceiling: Ceiling
    dtype: str  # "bf16"
    each: Bytes
    rate: str  # whose matmul ceiling counts: the dtype, or fp8
    scale: float
    notes: list[str]
    rates: list[float] = []  # noqa: RUF012  of synthetic acceptance
    context: int = CONTEXT  # of the longest request
    ready_seconds: float = 0.0


def default_shape(device: str) -> str:
    from cairn.models.checkpoint import default_device

    device = default_device() if device == "auto" else device
    return "tiny" if device == "cpu" else "qwen3-0.6b"


def prepare(setup: ThroughputSetup) -> ThroughputBench:
    """Load the model, measure the ceilings while there is room, then start the engine with all its graphs."""
    from cairn.models.runnable import open_model
    from cairn.serve.config import EngineConfig
    from cairn.serve.engine.start import start_with

    opened = open_model(setup.model)
    if setup.context is not None and setup.context > opened.spec.context:
        opened = open_model(setup.model, setup.context)
    runnable = opened.load(setup.device, setup.dtype)
    dtype = dtype_name(runnable.dtype)
    rate = "fp8" if setup.quantization == "fp8" else dtype
    ceiling = measure_ceiling(runnable.device, rate)
    release()
    scale = setup.scale or (CPU_SCALE if runnable.device == "cpu" else 1.0)
    context = setup.context or _context(setup.workloads, scale, opened.spec)
    began = time.perf_counter()
    config = EngineConfig(
        model=setup.model,
        device=setup.device,
        dtype=setup.dtype,
        plain=setup.plain,
        max_model_len=context,
        load_in_advance=not setup.synthetic_acceptance,  # which enters the graphs
        weights=setup.quantization or "auto",
        kv_cache_dtype=setup.kv_cache or "auto",
        head=setup.head or "auto",
        speculate=setup.speculate or "off",
        draft_tokens=setup.draft_tokens,
        max_num_seqs=setup.max_num_seqs,
    )
    started = start_with(opened, runnable, config, sole=bool(setup.quantization))
    rates = _dial_acceptance(started.engine, setup.synthetic_acceptance)
    ready = time.perf_counter() - began
    each = _bytes(runnable.model, started.engine)
    return ThroughputBench(
        setup=setup,
        engine=started.engine,
        spec=opened.spec,
        ceiling=ceiling,
        dtype=dtype,
        each=each,
        rate=rate,
        scale=scale,
        notes=started.notes,
        rates=rates,
        context=context,
        ready_seconds=ready,
    )


def _context(names: Sequence[str], scale: float, spec: "ModelSpec") -> int:
    """Context length for the longest request of these workloads, limited by the model."""
    longest = [totals(requests(name, scale)).longest for name in names]
    return min(max([CONTEXT, *longest]), spec.context)


def _dial_acceptance(engine: "Engine", asked: str) -> list[float]:
    """Let drafts hold as often as is asked for; the rates by position. Captures graphs, too."""
    from cairn.serve.engine.speculate import synthetic

    speculation, limits = engine.scheduler.speculation, engine.scheduler.limits
    if not asked or speculation is None:
        return []
    rates = synthetic.read_rates(asked, limits.drafts)
    if speculation.on_device:
        synthetic.make_synthetic_on_device(engine.runner, rates)
    else:
        synthetic.make_synthetic(speculation, rates, limits.vocabulary)
    engine.runner.warm_up()
    return rates


def _bytes(model: "Transformer", engine: "Engine") -> Bytes:
    """Bytes that this engine reads for a weight and for a key or value element."""
    from cairn.models.experts import ExpertLayer
    from cairn.models.linear.maps import linears

    read = [(part.read_bytes(), math.prod(part.shape_NK())) for part in linears(model)]
    for layer in model.modules():
        if isinstance(layer, ExpertLayer):
            read += [(w.nbytes, math.prod(w.shape)) for w in layer.matrices()]
    weight = sum(nbytes for nbytes, _ in read) / sum(count for _, count in read)
    return Bytes(weight, engine.runner.pool.cache.itemsize)


def choose_requests(
    name: str, scale: float, spec: "ModelSpec", context: int = CONTEXT
) -> tuple[list[WorkloadRequest], list[str]]:
    """The requests of a workload as this model can take them, and what had to differ."""
    chosen, notes = requests(name, scale), []
    context = min(context, spec.context)
    if name in CUT and totals(chosen).longest > context:
        chosen = [one._replace(prompt=one.prompt[: context - one.output]) for one in chosen]
        notes.append(f"prompts cut to the context of {context} tokens")
    if (longest := totals(chosen).longest) > context:
        raise UsageError(
            f"the longest request of {name} at scale {scale:g} has {longest} tokens, the context is {context}",
            hint=f"try --scale {0.9 * scale * context / longest:.2g}, or another shape",
        )
    if scale != 1:
        notes.append(f"scale {scale:g}: fewer and shorter requests than the workload's definition")
    if spec.vocab <= LARGEST_TOKEN:
        chosen = [one._replace(prompt=[t % spec.vocab for t in one.prompt]) for one in chosen]
        notes.append(f"token ids taken modulo the vocabulary of {spec.vocab}")
    return chosen, notes


def measure(bench: ThroughputBench, name: str, ran: Ran = lambda what: None) -> ThroughputRow:
    """The first run, if it counts; warm up, run `repeats` times, and hold the best run against the limit."""
    chosen, notes = choose_requests(name, bench.scale, bench.spec, bench.context)
    best_possible = limit(bench.spec, chosen, bench.ceiling, bench.rate, bench.each)
    blank = _blank(bench, name, totals(chosen), best_possible, notes)
    first = serve(bench.engine, chosen) if bench.setup.cold else None
    if first is not None:
        ran(f"{bench.setup.shape} {name} first run")
        if first.failure is not None:
            return msgspec.structs.replace(blank, failure=first.failure)
    short = [one._replace(output=min(one.output, WARM_TOKENS)) for one in chosen]
    for _ in range(WARM_RUNS if first is None else int(captures_more(bench.engine))):
        serve(bench.engine, short)
    ran(f"{bench.setup.shape} {name} warm-up")
    runs = []
    for number in range(bench.setup.repeats):
        runs.append(serve(bench.engine, chosen))
        ran(f"{bench.setup.shape} {name} {number + 1}/{bench.setup.repeats}")
        if runs[-1].failure is not None:
            return msgspec.structs.replace(blank, failure=runs[-1].failure)
    return _timed(blank, runs, first)


def captures_more(engine: "Engine") -> bool:
    """Return whether repeating the requests would capture more graphs."""
    graphs = getattr(engine.runner, "graphs", None)
    return graphs is not None and not graphs.is_settled


def report(
    origin: RecordOrigin,
    ceilings: dict[str, Ceiling],
    rows: Sequence[ThroughputRow],
    old: ThroughputReport | None = None,
) -> ThroughputReport:
    return ThroughputReport(
        ceilings={**(old.ceilings if old else {}), **ceilings},
        **merged(origin, rows, old, _key, lambda row: row.shape),
    )


def read(path: Path) -> ThroughputReport:
    return record.read(path, ThroughputReport, "throughput")


def device_of(setup: ThroughputSetup) -> str:
    """The name of the device that will be measured."""
    from cairn.models.checkpoint import check_device, default_device

    device = default_device() if setup.device == "auto" else setup.device
    check_device(device)
    return device_name(device)


def _blank(
    bench: ThroughputBench, name: str, all_of: WorkloadTotals, best: Limit, notes: list[str]
) -> ThroughputRow:
    return ThroughputRow(
        shape=bench.setup.shape,
        workload=name,
        dtype=bench.dtype,
        limit_seconds=best.seconds,
        limited_by=best.bound,
        requests=all_of.requests,
        input_tokens=all_of.input_tokens,
        output_tokens=all_of.output_tokens,
        repeats=bench.setup.repeats,
        scale=bench.scale,
        plain=bench.setup.plain,
        threads=_threads(bench),
        quantization=bench.setup.quantization,
        kv_cache=bench.setup.kv_cache,
        head=bench.setup.head,
        weight_bytes=bench.each.weight,
        ready_seconds=bench.ready_seconds,
        notes=[*notes, *_rows_note(bench.setup)],
        speculate=bench.setup.speculate,
        draft_tokens=bench.engine.scheduler.limits.drafts,
        synthetic_acceptance=bench.rates,
    )


def _rows_note(setup: ThroughputSetup) -> list[str]:
    usual = setup.max_num_seqs is None
    return [] if usual else [f"up to {setup.max_num_seqs} sequences at once"]


def _threads(bench: ThroughputBench) -> int | None:
    import torch

    return torch.get_num_threads() if bench.engine.runner.device.type == "cpu" else None


def _timed(
    blank: ThroughputRow, runs: Sequence[EngineRun], first: EngineRun | None
) -> ThroughputRow:
    best = min(runs, key=lambda run: run.seconds)
    if first is not None:
        share = best.seconds / first.seconds
        blank = msgspec.structs.replace(blank, first_seconds=first.seconds, first_of_warm=share)
    return msgspec.structs.replace(
        blank,
        output_tokens_per_s=blank.output_tokens / best.seconds,
        input_tokens_per_s=blank.input_tokens / best.seconds,
        seconds=best.seconds,
        median_seconds=statistics.median(run.seconds for run in runs),
        fraction_of_limit=blank.limit_seconds / best.seconds,
        steps=best.steps,
        acceptance_length=best.length,
        ledger=ledger(best.times),
    )


def ledger(times: Sequence["StepTimes"]) -> StepHostTimes:
    # Where drafts are waited for, a turn of the loop launches a step and the next one waits for it.
    turns = len(times) / max(sum(step.sequences > 0 for step in times), 1)

    def median_ms(part: str) -> float:
        spent = [getattr(step, part) for step in times]
        return 1e3 * (statistics.median(spent) if turns < 1.5 else turns * statistics.fmean(spent))

    parts = ("schedule", "launch", "wait", "update")
    return StepHostTimes(**{f"{part}_ms": median_ms(part) for part in parts})


def _key(row: ThroughputRow) -> tuple[object, ...]:
    form = (row.dtype, row.quantization, row.kv_cache, row.head)
    drafts = (row.speculate, row.draft_tokens, tuple(row.synthetic_acceptance))
    return row.shape, row.workload, *form, row.scale, row.plain, *drafts


def release() -> None:
    """Give back the memory of what is not referred to any more: before the next model is loaded."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
