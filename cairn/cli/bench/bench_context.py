"""`cairn bench context`: time to the first token and per token as the prompt grows. Measures nothing itself."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.core.units import format_duration
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.bench.context import ContextRow
    from cairn.bench.throughput import ThroughputSetup

HEADINGS = ("shape", "type", "tokens", "first token", "of floor", "per token", "of floor", "tokens/s")  # fmt: skip


class BenchContext(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Serve one prompt after another, each longer, with the engine in this process.

    By default 1,024 to 131,072 tokens on a GPU, as far as the model goes. A length beyond the model's context stretches
    its rotary positions, as `cairn serve --context` does.
    """

    shape: str = ""
    """shape of a model with random weights; by default one that suits the device"""
    model: str | None = None
    """a model with real weights, instead of a shape"""
    lengths: list[int] = []
    """tokens of the prompts"""
    output_len: int = 32
    """tokens of each answer"""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes a GPU where there is one"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """type to compute in"""
    quantization: str = ""
    """quantise the weights when the engine starts: fp8, w8a16, w4a16, nvfp4, or mxfp4 for experts"""
    kv_cache: Literal["", "fp8"] = ""
    """type of keys and values, if it is not the model's"""
    out: Path | None = None
    """write the rows to this file, after each one"""
    merge: bool = False
    """with --out: keep the rows of the file that this run does not measure"""
    commit: str | None = None
    """the commit that runs, where there is no git"""
    json: bool = False
    """print the whole document as JSON; lines go to stderr"""


def run(args: list[str]) -> int:
    options = load(BenchContext, args=args, env_prefix="CAIRN_BENCH_CONTEXT_").value
    if options.merge and options.out is None:
        raise UsageError("--merge is given without --out", hint="name the file with --out")
    if options.model is not None and options.shape:
        raise UsageError("both --model and --shape are given", hint="give one of them")
    from cairn.bench import context as bench
    from cairn.bench.record import origin, repeatable, require_commit, write
    from cairn.bench.throughput import device_of, prepare

    setup, lengths = _setup(options)
    bench.check_lengths(lengths, options.output_len)
    if options.out is not None:
        require_commit(options.commit)
    merged = options.out is not None and options.merge and options.out.exists()
    old = bench.read(options.out) if merged and options.out is not None else None
    command = repeatable(["bench", "context"], args)
    source = origin(command, device_of(setup), options.commit)
    setup = msgspec.structs.replace(setup, context=max(lengths) + options.output_len)
    ready = prepare(setup)
    rows: list[ContextRow] = []
    with progress(len(lengths), "measuring") as advance:
        for length in lengths:
            rows.append(bench.measure(ready, length, options.output_len))
            document = bench.report(source, {ready.rate: ready.ceiling}, rows, old)
            if options.out is not None:
                write(document, options.out)
            advance(f"{length} tokens")
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    print(table(rows), file=sys.stderr if options.json else sys.stdout, flush=True)
    return 1 if any(row.failure is not None for row in rows) else 0


def _setup(options: BenchContext) -> "tuple[ThroughputSetup, list[int]]":
    from cairn.bench.context import CPU_LENGTHS, GPU_LENGTHS
    from cairn.bench.throughput import ThroughputSetup, default_shape
    from cairn.models.checkpoint import default_device
    from cairn.models.presets import preset
    from cairn.models.runnable import RANDOM

    shape = options.shape or default_shape(options.device)
    model = options.model or f"{RANDOM}{shape}"
    device = default_device() if options.device == "auto" else options.device
    lengths = sorted(options.lengths) or list(CPU_LENGTHS if device == "cpu" else GPU_LENGTHS)
    if options.model is None and not options.lengths:
        most = preset(shape).context - options.output_len
        lengths = [length for length in lengths if length <= most]
    setup = ThroughputSetup(
        shape=Path(options.model).name if options.model is not None else shape,
        model=model,
        device=options.device,
        dtype=options.dtype,
        quantization=options.quantization,
        kv_cache=options.kv_cache,
        max_num_seqs=1,
    )
    return setup, lengths


def table(rows: "list[ContextRow]") -> str:
    from cairn.cli.columns import lines

    return "\n".join(lines(HEADINGS, [_cells(row) for row in rows], left=range(2)))


def _cells(row: "ContextRow") -> tuple[str, ...]:
    head = (row.shape, row.quantization or row.dtype, f"{row.length:,}")
    if row.ttft_s is None or row.tpot_s is None:
        return (*head, f"failed: {row.failure}", *[""] * (len(HEADINGS) - 4))
    return (
        *head,
        format_duration(row.ttft_s),
        f"{row.ttft_floor_s / row.ttft_s:.0%}",
        format_duration(row.tpot_s),
        f"{row.tpot_floor_s / row.tpot_s:.0%}",
        f"{1 / row.tpot_s:,.0f}",
    )
