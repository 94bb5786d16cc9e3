"""`cairn comm bench`: how long collectives take, with the flags, columns and JSON of nccl-tests.

Starts the ranks on this machine and prints what they measured; `cairn.comm.bench_sweep` measures.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.errors import HardwareError, UsageError, did_you_mean
from cairn.core.units import parse_bytes
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.comm.bench_spec import BenchRow, Spec

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
BACKENDS = ("gloo", "cairn", "nccl", "mpi")
OPERATIONS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "alltoall", "all_to_all": "alltoall", "broadcast": "broadcast", "reduce": "reduce",
    "sendrecv": "sendrecv", "gather": "gather", "scatter": "scatter",
}  # fmt: skip
# The letters and words of nccl-tests.
SHORT = {
    "-b": "--minbytes", "-e": "--maxbytes", "-f": "--stepfactor", "-i": "--stepbytes",
    "-n": "--iters", "-w": "--warmup-iters", "-d": "--datatype", "-o": "--op", "-r": "--root",
    "-c": "--check", "-g": "--ranks", "-T": "--timeout", "-J": "--output-file",
    "-I": "--per-iter", "-t": "--nthreads", "-m": "--agg-iters", "-N": "--run-cycles",
    "-a": "--average", "-C": "--report-cputime", "-S": "--report-timestamps",
    "-p": "--parallel-init", "-z": "--blocking",
}  # fmt: skip
WORDS = {"--ngpus": "--ranks"}
# Those that only a GPU can have: 0 is what happens here anyway.
GPU_ONLY = {
    "-y": "--stream-null",
    "-G": "--cudagraph",
    "-R": "--local-register",
    "-x": "--cta-policy",
    "-D": "--device-implementation",
    "-V": "--device-cta-count",
    "-M": "--memory",
}
OF_RANKS = ("first", "mean", "least", "most")  # -a
REDUCTIONS = ("sum", "prod", "max", "min")  # of -o all; an average is not exact in every type
MOST_RANKS = 64
LIMIT_S = 3600.0  # for all of it; each operation has -T


class Bench(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time a collective over backends of torch.distributed, as nccl-tests does.

    Takes its letters too: -b 1K -e 16M -f 4 -n 20 -m 1 -w 5 -N 1 -d float -o sum -r 0 -c 1 -t 1 -g RANKS -a 3
    -T SECONDS -C 0 -S 0 -p 0 -z 1 -J FILE -I. What only a GPU has (-G, -R, -y, -x, -D, -V, -M) may be 0.
    """

    operation: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OP")]
    """all_reduce, all_gather, reduce_scatter, alltoall, broadcast, reduce, sendrecv, gather, scatter"""
    minbytes: str = "1K"
    """the smallest message (-b)"""
    maxbytes: str = "16M"
    """the largest message (-e)"""
    stepfactor: int = 4
    """from one size to the next, times this (-f)"""
    stepbytes: str = ""
    """from one size to the next, plus this (-i)"""
    ranks: int = 2
    """processes on this machine (-g)"""
    nthreads: int = 1
    """so many times as many (-t)"""
    backends: str = "gloo,cairn"
    """which, of gloo, cairn, nccl and mpi; those that are not here are skipped, with the reason"""
    iters: int = 20
    """iterations of each size (-n)"""
    warmup_iters: int = 5
    """iterations before those (-w)"""
    agg_iters: int = 1
    """calls of an iteration, timed together (-m)"""
    run_cycles: int = 1
    """how often all sizes (-N)"""
    datatype: Literal[
        "float", "double", "half", "bfloat16", "int8", "int32", "int64", "uint8", "all"
    ] = "float"
    """of the elements (-d)"""
    op: Literal["sum", "prod", "min", "max", "avg", "all"] = "sum"
    """reduction (-o)"""
    root: int = 0
    """of broadcast, reduce, gather and scatter (-r)"""
    check: int = 1
    """0: do not count wrong elements (-c)"""
    average: Literal[0, 1, 2, 3] = 3
    """whose time an iteration has: 0 rank 0, 1 the mean of the ranks, 2 the fastest, 3 the slowest (-a)"""
    report_cputime: Literal[0, 1] = 0
    """1: CPU time of the process instead of the clock's (-C)"""
    report_timestamps: Literal[0, 1] = 0
    """1: when each row was done, in the last column (-S)"""
    parallel_init: Literal[0, 1] = 0
    """ranks always start at the same time (-p)"""
    blocking: Literal[0, 1] = 1
    """every iteration is waited for, as it is timed by itself (-z)"""
    timeout: float = 60.0
    """seconds that an operation may take (-T)"""
    per_iter: bool = False
    """least, most, 99th percentile and variation of the iterations as columns too (-I)"""
    output_file: Path | None = None
    """write the JSON of nccl-tests here (-J)"""
    html: Path | None = None
    """write a page with plots here"""
    json: bool = False
    """print one JSON document instead of the table"""


def run_bench(args: list[str]) -> int:
    options = load(Bench, args=_long(args), env_prefix="CAIRN_COMM_BENCH_").value
    ranks = options.ranks * options.nthreads
    for path in (options.output_file, options.html):
        _must_be_writable(path)
    with tempfile.TemporaryDirectory(prefix="cairn-bench-") as folder:
        specs, skipped = _specs(options, ranks, Path(folder) / "store")
        from cairn.comm.bench_report import document, lines, plots, wrong_of

        for name, reason in skipped.items():
            sys.stderr.write(f"skipped {name}: {reason}\n")
        if not options.blocking:
            sys.stderr.write("-z 0 changes nothing: every iteration is timed by itself\n")
        started = time.strftime(TIME_FORMAT)
        rows = _measured(options, specs, ranks)
    devices = [{"rank": rank, "device": rank, "device_info": "cpu"} for rank in range(ranks)]
    written = document(
        specs[0], rows, ranks, args=["cairn", "comm", "bench", *args], started=started,
        ended=time.strftime(TIME_FORMAT), skipped=skipped, devices=devices,
    )  # fmt: skip
    if options.output_file is not None:
        options.output_file.write_bytes(msgspec.json.encode(written))
    if options.html is not None:
        options.html.write_text(plots(specs[0], rows, ranks, started))
        sys.stderr.write(f"wrote {options.html}\n")
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(written)).decode())
    else:
        stamped = bool(options.report_timestamps)
        print("\n".join(lines(specs[0], rows, ranks, options.per_iter, stamped)))
    return 1 if wrong_of(rows) else 0


def _measured(options: Bench, specs: list["Spec"], ranks: int) -> list["BenchRow"]:
    """Measure on forked ranks, or on ranks of mpiexec if MPI is one of the backends."""
    from cairn.comm.bench_mpi import run_mpi
    from cairn.comm.bench_ranks import run_ranks
    from cairn.comm.bench_sweep import measure

    spec = specs[0]
    with progress(len(specs) * len(spec.sizes), options.operation) as advance:
        if "mpi" in spec.backends:
            return run_mpi(ranks, specs, lambda size: advance(f"{spec.operation} {size}"), LIMIT_S)
        return run_ranks(
            ranks,
            measure,
            specs,
            timeout_s=LIMIT_S,
            start="spawn" if "nccl" in spec.backends else "fork",
            on_message=lambda rank, size: advance(f"{spec.operation} {size}"),
        )[0]


def _must_be_writable(path: Path | None) -> None:
    """Now, and not after minutes of measuring."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {folder}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"cannot write {path}", hint="name another file")


def sizes_of(least: str, most: str, factor: int, step: str) -> list[int]:
    """Sizes from minimum to maximum by a factor or step. 1K is 1024 bytes, as in nccl-tests."""
    first, last = _size(least), _size(most)
    added = _size(step) if step else 0
    if first < 1 or last < first:
        raise UsageError(f"sizes from {least} to {most}", hint="use -b 1K -e 16M")
    if not added and factor < 2:
        raise UsageError(f"a step factor of {factor}", hint="use -f 2 or more, or -i BYTES")
    found = [first]
    while (following := found[-1] + added if added else found[-1] * factor) <= last:
        found.append(following)
    return found


def _size(text: str) -> int:
    """K, M and G of nccl-tests are powers of 1024."""
    letter = text[-1:].upper()
    return parse_bytes(f"{text}iB" if letter in "KMG" and letter else text)


def _long(args: list[str]) -> list[str]:
    """Letters as words; `-c 1` and `-b1K` both as nccl-tests takes them."""
    found: list[str] = []
    for arg in args:
        letter, word = arg[:2], arg.partition("=")[0].replace("_", "-")
        if arg[1:2] == "-" and word in WORDS:
            found += [WORDS[word], *arg.partition("=")[2:][: bool("=" in arg)]]
        elif arg[1:2] != "-" and letter in SHORT | GPU_ONLY:
            found += [(SHORT | GPU_ONLY)[letter], *([arg[2:]] if arg[2:] else [])]
        else:
            found.append(arg)
    return _without_gpu_words(found)


def _without_gpu_words(args: list[str]) -> list[str]:
    found, rest = [], iter(args)
    for arg in rest:
        word, equals, value = arg.partition("=")
        if word.replace("_", "-") not in GPU_ONLY.values():
            found.append(arg)
            continue
        value = value if equals else next(rest, "")
        if value != "0":
            raise UsageError(
                f"{word} {value}: nothing here has that", hint="it is of CUDA: leave it out, or 0"
            )
    return found


def _check(options: Bench, ranks: int) -> None:
    """A mistake is refused before torch loads."""
    operation = options.operation.removesuffix("_perf")
    if operation not in OPERATIONS:
        raise UsageError(
            f"no collective '{options.operation}'",
            hint=did_you_mean(operation, OPERATIONS, f"one of {', '.join(OPERATIONS)}"),
        )
    if not 2 <= ranks <= MOST_RANKS:
        raise UsageError(f"{ranks} ranks", hint=f"2 to {MOST_RANKS} on one machine")
    if not 0 <= options.root < ranks:
        raise UsageError(
            f"rank {options.root} of {ranks} cannot be the root", hint=f"-r 0 to {ranks - 1}"
        )
    if options.iters < 1 or options.warmup_iters < 0 or options.timeout <= 0:
        raise UsageError(
            f"{options.iters} iterations, {options.warmup_iters} before, {options.timeout} s",
            hint="one iteration or more, and a timeout above 0",
        )
    if options.agg_iters < 1 or options.run_cycles < 1:
        raise UsageError(
            f"-m {options.agg_iters} -N {options.run_cycles}",
            hint="one or more; nothing is endless here",
        )
    for name in _asked(options):
        if name not in BACKENDS:
            raise UsageError(
                f"no backend '{name}'",
                hint=did_you_mean(name, BACKENDS, f"one of {', '.join(BACKENDS)}"),
            )
    if options.op == "avg" and options.datatype not in ("float", "double"):
        raise UsageError(
            f"an average of {options.datatype} is not exact", hint="use -d float, or another -o"
        )


def _asked(options: Bench) -> list[str]:
    names = [name.strip() for name in options.backends.split(",") if name.strip()]
    return list(dict.fromkeys(names))


def _specs(options: Bench, ranks: int, store: Path) -> tuple[list["Spec"], dict[str, str]]:
    """Specifications for every type and reduction, and the unavailable backends."""
    _check(options, ranks)
    sizes = sizes_of(options.minbytes, options.maxbytes, options.stepfactor, options.stepbytes)
    from cairn.comm.bench_operations import REDUCING, TYPES
    from cairn.comm.bench_spec import Spec

    operation = OPERATIONS[options.operation.removesuffix("_perf")]
    types = list(TYPES) if options.datatype == "all" else [options.datatype]
    every = list(REDUCTIONS) if operation in REDUCING else ["sum"]
    reductions = every if options.op == "all" else [options.op]
    present, skipped = _present(options, ranks, types, reductions)
    return [
        Spec(
            operation=operation,  # pyrefly: ignore
            backends=present, sizes=sizes * options.run_cycles, type=kind, reduction=reduction,
            root=options.root, iterations=options.iters, warmup=options.warmup_iters,
            check=options.check != 0, timeout_s=options.timeout, together=options.agg_iters,
            of_ranks=OF_RANKS[options.average], cpu_time=bool(options.report_cputime),
            store=str(store),
        )
        for kind in types for reduction in reductions
    ], skipped  # fmt: skip


def _present(
    options: Bench, ranks: int, types: list[str], reductions: list[str]
) -> tuple[list[str], dict[str, str]]:
    from cairn.comm.bench_mpi import NO_TYPES
    from cairn.comm.bench_sweep import missing

    asked = _asked(options)
    skipped = {name: reason for name in asked if (reason := missing(name, ranks))}
    if "gloo" in asked and "avg" in reductions:
        skipped["gloo"] = "it has no average"
    lacking = [kind for kind in types if kind in NO_TYPES]
    if "mpi" in asked and lacking:
        skipped.setdefault("mpi", f"it has no {lacking[0]}")
    if "mpi" in asked and "mpi" not in skipped and "nccl" in asked and "nccl" not in skipped:
        skipped["mpi"] = "not in one run with nccl"
    present = [name for name in asked if name not in skipped]
    if not present:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise HardwareError(f"none of the backends is here ({reasons})", hint="use --backends gloo")
    return present, skipped
