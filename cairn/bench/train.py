"""Training throughput in tokens per second, and its MFU.

    shape -> state as `cairn train` has it -> warm-up -> rounds of steps on random tokens -> Row -> training.json

A step is the whole of it: forward, backward, norm, clipping, AdamW. The batch is on the device already, as a run has it
by prefetching. Kernels are compiled in the warm-up, which also settles the allocator; the peak of memory is that of the
steps after it. Prints nothing.
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
from cairn.bench.limit import device_name, measure_ceiling
from cairn.bench.record import RecordOrigin, merged
from cairn.core.errors import ConfigError
from cairn.core.garbage_collection import quiet_collector

if TYPE_CHECKING:
    from cairn.train.config import Train
    from cairn.train.data.batch import Batch
    from cairn.train.state import TrainState

Dtype = Literal["fp32", "bf16", "fp16", "fp8", "fp8-row"]
Ran = Callable[[str], None]


class TrainRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of benchmarks/h200/training.json. `failure` says why a row has no time."""

    model: str
    dtype: str
    tokens_per_s: float | None = None  # of the best round
    median_tokens_per_s: float | None = None
    # True FLOPs of the model, causal attention counted once, of the vendor's peak.
    mfu: float | None = None
    mfu_titan: float | None = None  # as torchtitan counts: attention as if unmasked, no embedding
    of_measured: float | None = None  # true FLOPs, of the matmul rate measured here
    peak_gib: float | None = None
    predicted_gib: float | None = None
    seq: int
    batch: int
    microbatch: int
    states: str = "float32"
    recompute: str = "none"
    plain: bool = False
    lora: int = 0  # rank of the adapter that is trained; 0: all weights are
    base: str = "float"  # of the frozen weights under the adapter
    layers: int = 0  # fewer than the model has; 0: all of them
    offloaded: int = 0  # layers whose activations wait on the host
    step_ms: float | None = None
    # Of a step: until all of it is launched; less than step_ms, or the device waits.
    host_ms: float | None = None
    loss: float | None = None  # of the last step: finite, or the row means nothing
    steps: int = 0
    failure: str | None = None
    commit: str = ""


class TrainReport(RecordOrigin, frozen=True, kw_only=True):
    """benchmarks/h200/training.json."""

    formula: str = (
        "mfu = 3 * forward FLOPs (2 per multiply-add; output projection and causal pairs counted, lookups not), "
        "of frozen matrices twice, "
        "/ seconds / vendor's dense bf16 peak; mfu_titan = (6 (N - embedding) + 12 L H C S) tokens / seconds / peak"
    )
    rows: list[TrainRow]


class TrainSetup(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    dtype: Dtype = "bf16"
    seq: int = 4096
    batch: int = 8
    microbatch: int | None = None  # None: the whole batch at once
    recompute: Literal["auto", "none", "norms", "selective", "full"] = "auto"
    memory_gib: float = 0.0  # what auto may use; 0: nine tenths of the device
    offload: bool = False  # activations that do not fit wait on the host
    states: Literal["float32", "bfloat16", "int8"] = "float32"
    optim: Literal["adamw", "muon"] = "adamw"
    plain: bool = False
    lora: int = 0  # rank of an adapter on all linear maps; 0: all weights are trained
    base: Literal["float", "nf4"] = "float"  # of the frozen weights under the adapter
    layers: int = 0  # fewer than the model has; 0: all of them
    device: str = "auto"
    steps: int = 10  # of a round
    rounds: int = 3
    warmup: int = 5


def recorded_setups(device: str) -> list[TrainSetup]:
    """The rows of benchmarks/h200/training.json."""
    rows = [
        TrainSetup(
            model=model,
            dtype="fp8" if narrow else "bf16",
            memory_gib=room,
            device=device,
            steps=8,
            rounds=2,
            warmup=3,
        )
        for model, room in (("qwen3-0.6b", 50.0), ("qwen3-1.7b", 80.0))
        for narrow in (True, False)
    ]
    large = [
        TrainSetup(
            model=model,
            layers=layers,
            states="bfloat16",
            microbatch=4,
            device=device,
            steps=2,
            rounds=1,
            warmup=2,
        )
        for model, layers in (("qwen3-8b", 0), ("qwen3-30b-a3b", 12))
    ]
    return [*rows, *large]


class TrainBench(NamedTuple):
    setup: TrainSetup
    state: "TrainState"
    batches: "list[Batch]"
    device: str


def config_of(setup: TrainSetup) -> "Train":
    """The recipe that is timed."""
    from cairn.train.config import Adapter, Data, Model, Optim, Precision, Train

    kinds = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    beside_fp8 = "float32" if setup.device == "cpu" else "bfloat16"
    fp8 = {"fp8": "tensor", "fp8-row": "row"}.get(setup.dtype, "none")
    precision = msgspec.convert(
        {
            "kind": kinds.get(setup.dtype, beside_fp8),
            "fp8": fp8,
            "recompute": setup.recompute,
            "memory_gib": setup.memory_gib,
            "offload_activations": setup.offload,
            "masters": setup.states == "float32",
            "kernels": "plain" if setup.plain else "auto",
        },
        Precision,
    )
    data = Data(
        sources=["random"],
        sequence=setup.seq,
        sequences=setup.batch,
        microbatch=setup.microbatch or setup.batch,
    )
    return Train(
        steps=1000,
        model=Model(preset=setup.model, layers=setup.layers),
        data=data,
        device=setup.device,
        optim=Optim(states=setup.states, kind=setup.optim),
        precision=precision,
        adapter=Adapter(rank=setup.lora, base=setup.base),
    )


def prepare(setup: TrainSetup) -> TrainBench:
    import torch

    from cairn.models.checkpoint import check_device, default_device
    from cairn.train.data.source import microbatch
    from cairn.train.describe import describe
    from cairn.train.prepare import assemble

    config = config_of(setup)
    name = default_device() if setup.device == "auto" else setup.device
    check_device(name)
    device = torch.device(name)
    corpus, spec, start = describe(config)
    state = assemble(config, device, corpus, spec, start).state
    size = config.data.microbatch
    numbers = [range(first, first + size) for first in range(0, setup.batch, size)]
    batches = [microbatch(corpus.source, part).to(device) for part in numbers]
    return TrainBench(setup, state, batches, str(device))


def measure(setup: TrainSetup, ran: Ran = lambda what: None) -> TrainRow:
    """Measure one row. Running out of memory gives a row with a failure, not an exception."""
    import torch

    blank = TrainRow(
        model=setup.model,
        dtype=setup.dtype,
        seq=setup.seq,
        batch=setup.batch,
        microbatch=setup.microbatch or setup.batch,
        states=setup.states,
        recompute=setup.recompute,
        plain=setup.plain,
        lora=setup.lora,
        base=setup.base,
        layers=setup.layers,
        steps=setup.steps,
    )
    try:
        bench = prepare(setup)
        return _timed(blank, bench, ran)
    except torch.cuda.OutOfMemoryError as error:
        return msgspec.structs.replace(
            blank, failure=f"out of memory: {str(error).splitlines()[0]}"
        )
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _timed(blank: TrainRow, bench: TrainBench, ran: Ran) -> TrainRow:
    import torch

    setup, on_gpu = bench.setup, bench.device != "cpu"
    _steps(bench, setup.warmup)
    ran(f"{setup.model} {setup.dtype} warm-up")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds, launched = [], []
    loss = float("nan")
    for number in range(setup.rounds):
        with quiet_collector():
            took, host, loss = _steps(bench, setup.steps)
        seconds.append(took / setup.steps)
        launched.append(host / setup.steps)
        ran(f"{setup.model} {setup.dtype} {number + 1}/{setup.rounds}")
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    blank = msgspec.structs.replace(blank, host_ms=1e3 * min(launched), peak_gib=peak, loss=loss)
    return _filled(blank, bench, seconds)


def _steps(bench: TrainBench, count: int) -> tuple[float, float, float]:
    """Seconds from an idle device to an idle device, until all was launched, and the last loss."""
    from cairn.train.step import train_step

    _wait(bench)
    began = time.perf_counter()
    result = None
    for _ in range(count):
        result = train_step(bench.state, bench.batches)
    host = time.perf_counter() - began
    _wait(bench)
    took = time.perf_counter() - began
    return took, host, float("nan") if result is None else result.loss.item()


def _wait(bench: TrainBench) -> None:
    import torch

    if bench.device != "cpu":
        torch.cuda.synchronize()


def _filled(blank: TrainRow, bench: TrainBench, seconds: Sequence[float]) -> TrainRow:
    from cairn.train.flops import peak_flops, step_flops, titan_flops
    from cairn.train.memory import predict

    state, setup = bench.state, bench.setup
    tokens, best = setup.seq * setup.batch, min(seconds)
    frozen = setup.lora > 0
    flops = step_flops(state.spec, [n for batch in bench.batches for n in batch.lengths], frozen)
    titan = titan_flops(state.spec, tokens, setup.seq)
    unit = "fp32" if setup.dtype == "fp32" else "bf16"
    peak = peak_flops(device_name(bench.device), unit)
    measured = measure_ceiling(bench.device, unit).flops_per_s.get(unit)
    return msgspec.structs.replace(
        blank,
        tokens_per_s=tokens / best,
        median_tokens_per_s=tokens / statistics.median(seconds),
        mfu=flops / best / peak if peak else None,
        mfu_titan=titan / best / peak if peak and not frozen else None,  # it knows no adapters
        of_measured=flops / best / measured if measured else None,
        predicted_gib=predict(
            state.spec, state.config, not setup.plain, frozen_values(state)
        ).total()
        / 2**30,
        recompute=state.config.precision.recompute,
        offloaded=state.config.precision.offload_layers,
        step_ms=1e3 * best,
        failure=None if math.isfinite(blank.loss or 0.0) else "the loss is not finite",
    )


def frozen_values(state: "TrainState") -> int:
    """Values of the model that are not trained; what is trained beside them, as an adapter is, is small."""
    trained = sum(
        weight.numel() for weight in state.parallel.parameters().values() if weight.requires_grad
    )
    return max(0, state.spec.parameters() - trained)


def check(setup: TrainSetup) -> None:
    """Refuses what cannot work before anything is allocated."""
    if setup.microbatch is not None and setup.batch % setup.microbatch:
        raise ConfigError(
            f"batch {setup.batch} % microbatch {setup.microbatch} = {setup.batch % setup.microbatch}",
            hint="the batch is a multiple of the microbatch",
        )
    config_of(setup)


def report(
    origin: RecordOrigin, rows: Sequence[TrainRow], old: TrainReport | None = None
) -> TrainReport:
    return TrainReport(**merged(origin, rows, old, _key, lambda row: row.model))


def read(path: Path) -> TrainReport:
    return record.read(path, TrainReport, "train")


def _key(row: TrainRow) -> tuple[object, ...]:
    return (
        row.model,
        row.dtype,
        row.seq,
        row.batch,
        row.microbatch,
        row.states,
        row.recompute,
        row.plain,
        row.lora,
        row.base,
        row.layers,
    )
