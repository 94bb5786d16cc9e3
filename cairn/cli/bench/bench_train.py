"""`cairn bench train`: tokens per second and MFU of the trainer on one device. Measures nothing itself."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.bench.train import TrainRow, TrainSetup

Positive = Annotated[int, msgspec.Meta(ge=1)]


class BenchTrain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time whole training steps on random tokens: forward, backward, clipping, AdamW.

    MFU counts the true FLOPs of the model, without recomputation, against the vendor's peak in bf16; beside it stand
    torchtitan's way of counting and the share of the matmul rate that is measured here.
    """

    model: list[str] = []
    """shapes: qwen3-0.6b, qwen3-1.7b, ...; by default the six rows of the record on a GPU, a tiny one on a CPU"""
    dtype: list[Literal["fp32", "bf16", "fp16", "fp8", "fp8-row"]] = []
    """fp8: products of the layers with a scale for each tensor; by default bf16, on a CPU fp32"""
    seq: Positive = 4096
    """tokens of a sequence"""
    batch: Positive = 8
    """sequences of a step"""
    microbatch: Positive | None = None
    """sequences that are computed at once; by default all of them"""
    recompute: Literal["auto", "none", "norms", "selective", "full"] = "auto"
    """what backward computes again: outputs of norms; of activations, too; whole layers; auto: as little as fits"""
    memory_gib: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """with auto: what may be used of the device's memory; 0: nine tenths of it"""
    offload_activations: bool = False
    """activations that do not fit wait in the host's memory, before whole layers are computed again"""
    states: Literal["float32", "bfloat16", "int8"] = "float32"
    """of the optimizer; float32 comes with float32 masters, the others round at random"""
    optim: Literal["adamw", "muon"] = "adamw"
    lora: Annotated[int, msgspec.Meta(ge=0)] = 0
    """rank of an adapter on all linear maps, which is trained in place of the weights"""
    layers: Annotated[int, msgspec.Meta(ge=0)] = 0
    """train fewer layers than the model has, where all of them do not fit; 0: all"""
    plain: bool = False
    """torch's own operations in place of our kernels"""
    steps: Positive = 10
    """of each round"""
    rounds: Positive = 3
    """the best and the median are reported"""
    warmup: Positive = 5
    """steps before the first round"""
    device: str = "auto"
    out: Path | None = None
    """write the rows to this file, after each one"""
    merge: bool = False
    """with --out: keep the rows of the file that this run does not measure"""
    commit: str | None = None
    """the commit that runs, where there is no git"""
    json: bool = False
    """print the whole document as JSON; lines go to stderr"""


def run(args: list[str]) -> int:
    options = load(BenchTrain, args=args, env_prefix="CAIRN_BENCH_TRAIN_").value
    if options.merge and options.out is None:
        raise UsageError("--merge is given without --out", hint="name the file with --out")
    from cairn.bench import train as bench
    from cairn.bench.limit import device_name
    from cairn.bench.record import origin, repeatable, require_commit, write
    from cairn.models.checkpoint import check_device, default_device

    device = default_device() if options.device == "auto" else options.device
    check_device(device)
    setups = _setups(options, device)
    if options.out is not None:
        require_commit(options.commit)
    old = None
    if options.out is not None and options.merge and options.out.exists():
        old = bench.read(options.out)
    source = origin(repeatable(["bench", "train"], args), device_name(device), options.commit)
    rows: list[TrainRow] = []
    with progress(len(setups) * (1 + options.rounds), "starting") as advance:
        for setup in setups:
            rows.append(bench.measure(setup, advance))
            _log_line(line(rows[-1]), options)
            if options.out is not None:
                write(bench.report(source, rows, old), options.out)
    if options.json:
        document = bench.report(source, rows, old)
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    return 1 if any(row.failure is not None for row in rows) else 0


def _setups(options: BenchTrain, device: str) -> "list[TrainSetup]":
    from cairn.bench.train import TrainSetup, check, recorded_setups
    from cairn.models.presets import preset

    on_gpu = device != "cpu"
    if on_gpu and not options.model:
        _check_alone(options)
        return recorded_setups(device)
    setups = []
    for model in options.model or ["tiny"]:
        preset(model)  # refused before the first model is measured
        for dtype in options.dtype or ["bf16" if on_gpu else "fp32"]:
            setup = TrainSetup(
                model=model, dtype=dtype, seq=options.seq, batch=options.batch,
                microbatch=options.microbatch, recompute=options.recompute,
                memory_gib=options.memory_gib, offload=options.offload_activations, states=options.states,
                optim=options.optim, plain=options.plain, lora=options.lora, layers=options.layers, device=device,
                steps=options.steps, rounds=options.rounds, warmup=options.warmup,
            )  # fmt: skip
            check(setup)
            setups.append(setup)
    return setups


def _check_alone(options: BenchTrain) -> None:
    """Rows of the record have settings of their own: others would not be comparable."""
    free = {"model", "device", "out", "merge", "commit", "json"}
    default = BenchTrain()
    for name in set(options.__struct_fields__) - free:
        if getattr(options, name) != getattr(default, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} is given without --model", hint="name the models that it is meant for"
            )


def line(row: "TrainRow") -> str:
    cut = f" of {row.layers} layers" if row.layers else ""
    head = f"{row.model}{cut} {row.dtype} {row.batch} x {row.seq}: "
    if row.failure is not None or row.tokens_per_s is None:
        return f"{head}FAILED: {row.failure}"
    parts = [f"{row.tokens_per_s:,.0f} tokens/s", f"{row.step_ms:.1f} ms a step"]
    if row.host_ms is not None:
        parts[-1] += f" ({row.host_ms:.1f} of the host)"
    if row.mfu is not None and row.mfu_titan is not None:
        parts.append(f"MFU {row.mfu:.1%} (as torchtitan counts: {row.mfu_titan:.1%})")
    if row.of_measured is not None:
        parts.append(f"{row.of_measured:.1%} of the measured matmul rate")
    if row.peak_gib is not None:
        parts.append(f"{row.peak_gib:.1f} GiB (predicted {row.predicted_gib:.1f})")
    parts.append(f"recompute {row.recompute}")
    if row.offloaded:
        parts.append(f"{row.offloaded} layers offloaded")
    return head + ", ".join(parts)


def _log_line(text: str, options: BenchTrain) -> None:
    # sys.stdout is looked up anew: a progress bar puts something else there.
    print(text, file=sys.stderr if options.json else sys.stdout, flush=True)
