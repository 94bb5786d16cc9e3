"""`cairn bench throughput`: the serving engine on whole workloads, with a table at the end.

Says what it measures, shows how far it is, writes the record after every row. Measures nothing itself.
"""

import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.core.prose import in_terminal
from cairn.core.units import format_duration, format_rate
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.bench.throughput import ThroughputBench, ThroughputRow, ThroughputSetup

HEADINGS = ("shape", "workload", "type", "out tok/s", "in tok/s", "best", "first/warm", "of limit")
STEPS = ("shape", "workload", "steps", "schedule", "launch", "wait", "update")


class BenchThroughput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Serve whole workloads with the engine in this process, and hold the speed against the limit of this machine.

    Workloads: nano, latency, prefill, decode, shared, or all for these five. As people have them: conversations, turns,
    agents, long, books, document, streams, brief, sampled, logprobs, or everyday for these ten. Every run begins with
    an empty prefix cache. On a CPU the workloads run at a tenth of their size (--scale 0.1), and the rows say so.
    """

    workload: list[str] = []
    """which workloads, or all, or everyday; by default nano"""
    shape: list[str] = []
    """shapes of models with random weights: qwen3-0.6b, qwen3-8b, tiny, ...; by default one that suits the device"""
    model: str | None = None
    """a model with real weights, instead of a shape: a folder, a GGUF file or a name on the hub"""
    repeats: int = 3
    """runs of each workload; the best and the median are reported"""
    cold: bool = False
    """measure the first run of a fresh engine, too: each workload gets an engine of its own"""
    scale: float | None = None
    """make the workloads smaller: 0.5 is half the requests with half the tokens each"""
    plain: bool = False
    """the plain forms of everything: no overlap, no graphs, no fused kernels"""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes a GPU where there is one"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """type to compute in; auto keeps the type of the weights where the device is good at it"""
    quantization: str = ""
    """quantise the weights when the engine starts: fp8, w8a16, w4a16, nvfp4, or mxfp4 for experts"""
    kv_cache: Literal["", "fp8"] = ""
    """type of keys and values, if it is not the model's"""
    head: Literal["", "8bit"] = ""
    """output projection in float8"""
    speculate: str = ""
    """who drafts: ngram, suffix or auto; answers stay the same"""
    draft_tokens: int | Literal["auto"] = "auto"
    """most drafts of a request in a step; auto: as many as are expected to save time, with --synthetic-acceptance as
    many as there are rates, or 4 or more for a length"""
    synthetic_acceptance: str = ""
    """drafts hold by chance, for random weights: rates by position (0.8,0.6,0.4), or one length such as 3.0"""
    max_num_seqs: int | None = None
    """most requests that run at once, by default as many as `cairn serve` takes; fewer need fewer graphs, as latency
    does with 1"""
    out: Path | None = None
    """write the rows to this file, after each one"""
    merge: bool = False
    """with --out: keep the rows of the file that this run does not measure"""
    commit: str | None = None
    """the commit that runs, where there is no git"""
    json: bool = False
    """print the whole document as JSON; lines go to stderr"""


def run(args: list[str]) -> int:
    options = load(BenchThroughput, args=args, env_prefix="CAIRN_BENCH_THROUGHPUT_").value
    _check(options)
    from cairn.bench import throughput as bench
    from cairn.bench import workload
    from cairn.bench.record import origin, repeatable, require_commit, write

    names = workload.choose(options.workload or ["nano"])
    setups = _setups(options)
    if options.out is not None:
        require_commit(options.commit)
    old = None
    if options.out is not None and options.merge and options.out.exists():
        old = bench.read(options.out)
    command = repeatable(["bench", "throughput"], args)
    source = origin(command, bench.device_of(setups[0]), options.commit)
    rows: list[ThroughputRow] = []
    ceilings = {}
    groups = [[name] for name in names] if options.cold else [names]
    runs = 1 + options.repeats + options.cold
    with progress(len(setups) * len(names) * runs, "starting") as advance:
        for setup, group in itertools.product(setups, groups):
            ready = _ready(msgspec.structs.replace(setup, workloads=group), options)
            ceilings[ready.rate] = ready.ceiling
            for name in group:
                rows.append(bench.measure(ready, name, advance))
                _log_line(line(rows[-1]), options)
                if options.out is not None:
                    write(bench.report(source, ceilings, rows, old), options.out)
            del ready
            bench.release()
    document = bench.report(source, ceilings, rows, old)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    _log_line("\n" + table(rows), options)
    return 1 if any(row.failure is not None for row in rows) else 0


def _check(options: BenchThroughput) -> None:
    if options.merge and options.out is None:
        raise UsageError("--merge is given without --out", hint="name the file with --out")
    if options.model is not None and options.shape:
        raise UsageError("both --model and --shape are given", hint="give one of them")
    _draft_tokens(options)
    if options.max_num_seqs is not None and options.max_num_seqs < 1:
        raise UsageError(f"--max-num-seqs is {options.max_num_seqs}", hint="it is at least 1")
    if not 1 <= options.repeats <= 1000:
        raise UsageError(f"--repeats is {options.repeats}", hint="it is between 1 and 1000")
    if options.scale is not None and not 0 < options.scale <= 1:
        raise UsageError(f"--scale is {options.scale}", hint="it is above 0 and at most 1")


def _draft_tokens(options: BenchThroughput) -> int | Literal["auto"]:
    """Number of drafts; with synthetic acceptance it is constant: the requested one, or the one it needs."""
    if not options.synthetic_acceptance:
        return options.draft_tokens
    from cairn.serve.engine.speculate.synthetic import read_rates

    if options.speculate in ("", "off"):
        raise UsageError(
            "--synthetic-acceptance is given without a drafter", hint="add --speculate ngram"
        )
    return len(read_rates(options.synthetic_acceptance, options.draft_tokens))


def _setups(options: BenchThroughput) -> "list[ThroughputSetup]":
    from cairn.bench.throughput import ThroughputSetup, default_shape
    from cairn.models.presets import preset
    from cairn.models.runnable import RANDOM

    # A folder goes by its own name: its path belongs to this machine and not into a record.
    models = {Path(options.model).name: options.model} if options.model is not None else {}
    for shape in options.shape or ([] if models else [default_shape(options.device)]):
        preset(shape)  # refused before the first model is measured
        models[shape] = f"{RANDOM}{shape}"
    return [
        ThroughputSetup(
            shape=shape, model=model, device=options.device, dtype=options.dtype,
            plain=options.plain, scale=options.scale, repeats=options.repeats,
            quantization=options.quantization, kv_cache=options.kv_cache, head=options.head,
            speculate=options.speculate, draft_tokens=_draft_tokens(options),
            synthetic_acceptance=options.synthetic_acceptance, max_num_seqs=options.max_num_seqs,
            cold=options.cold,
        )
        for shape, model in models.items()
    ]  # fmt: skip


def _ready(setup: "ThroughputSetup", options: BenchThroughput) -> "ThroughputBench":
    from cairn.bench.throughput import prepare

    began = time.perf_counter()
    ready = prepare(setup)
    for note in ready.notes:
        _log_line(in_terminal(note), options)
    rates = [
        f"{name} {format_rate(rate, 'FLOP')}" for name, rate in ready.ceiling.flops_per_s.items()
    ]
    limits = ", ".join([f"copy {format_rate(ready.ceiling.bytes_per_s, 'B')}", *rates])
    took = format_duration(time.perf_counter() - began)
    _log_line(f"{ready.ceiling.device}: {limits}; ready after {took}", options)
    return ready


def line(row: "ThroughputRow") -> str:
    head = f"{row.shape} {row.workload}{form(row)}: "
    if row.failure is not None or row.seconds is None:
        return f"{head}FAILED: {row.failure}"
    notes = f" ({'; '.join(row.notes)})" if row.notes else ""
    if row.first_seconds is not None and row.first_of_warm is not None:
        first = (
            f"{format_duration(row.first_seconds)}, {row.first_of_warm:.0%} of the best run's speed"
        )
        notes = f"; first run {first}{notes}"
    return (
        f"{head}{row.output_tokens_per_s:,.0f} output tokens/s, {row.input_tokens_per_s:,.0f} input tokens/s, "
        f"{format_duration(row.seconds)}, {row.fraction_of_limit:.0%} of the limit ({row.limited_by}){notes}"
    )


def form(row: "ThroughputRow") -> str:
    """Describe deviations from the model's dtype."""
    parts = (
        row.quantization,
        row.kv_cache and f"{row.kv_cache} KV",
        row.head and f"{row.head} head",
        row.speculate and f"{row.speculate} {row.draft_tokens}{_length(row)}",
    )
    return "".join(f", {part}" for part in parts if part)


def _length(row: "ThroughputRow") -> str:
    return f" length {row.acceptance_length:.2f}" if row.acceptance_length else ""


def table(rows: "list[ThroughputRow]") -> str:
    """Speeds, then where the host's time went in the median step: two tables, so that each fits 80 columns."""
    from cairn.cli.columns import lines

    speeds = lines(HEADINGS, [_cells(row) for row in rows], left=range(3))
    ran = [cells for row in rows if (cells := _step_cells(row))]
    if not ran:
        return "\n".join(speeds)
    steps = lines(STEPS, ran, left=range(2))
    return "\n".join([*speeds, "", "The median step of the best run, on the host:", *steps])


def _cells(row: "ThroughputRow") -> tuple[str, ...]:
    head = (row.shape, row.workload, row.dtype + form(row))
    if row.seconds is None:
        return (*head, "failed", *[""] * (len(HEADINGS) - 4))
    return (
        *head,
        f"{row.output_tokens_per_s:,.0f}",
        f"{row.input_tokens_per_s:,.0f}",
        f"{row.seconds:.3f} s",
        "" if row.first_of_warm is None else f"{row.first_of_warm:.1%}",
        f"{row.fraction_of_limit:.1%}",
    )


def _step_cells(row: "ThroughputRow") -> tuple[str, ...] | None:
    if row.ledger is None:
        return None
    parts = (row.ledger.schedule_ms, row.ledger.launch_ms, row.ledger.wait_ms, row.ledger.update_ms)
    return row.shape, row.workload, str(row.steps), *(f"{part:.2f} ms" for part in parts)


def _log_line(text: str, options: BenchThroughput) -> None:
    # sys.stdout is looked up anew: a progress bar puts something else there.
    print(text, file=sys.stderr if options.json else sys.stdout, flush=True)
