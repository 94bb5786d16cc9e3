"""`cairn comm bench`: how long collectives take, with the flags, columns and JSON of nccl-tests.

Starts the ranks on this machine and prints what they measured; `cairn.comm.bench_sweep` measures.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn.cli.progress import progress
from cairn.core.config import load
from cairn.core.errors import HardwareError, UsageError, did_you_mean
from cairn.core.units import parse_bytes

if TYPE_CHECKING:
    from cairn.comm.bench_sweep import Spec

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
BACKENDS = ("gloo", "cairn", "nccl", "mpi")
OPERATIONS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "alltoall", "all_to_all": "alltoall", "broadcast": "broadcast", "reduce": "reduce",
    "sendrecv": "sendrecv", "gather": "gather", "scatter": "scatter",
}  # fmt: skip
# The letters of nccl-tests.
SHORT = {
    "-b": "--minbytes", "-e": "--maxbytes", "-f": "--stepfactor", "-i": "--stepbytes",
    "-n": "--iters", "-w": "--warmup-iters", "-d": "--datatype", "-o": "--op", "-r": "--root",
    "-c": "--check", "-g": "--ranks", "-T": "--timeout", "-J": "--output-file",
    "-I": "--per-iter",
}  # fmt: skip
MOST_RANKS = 64


class Bench(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time a collective over backends of torch.distributed, as nccl-tests does.

    Takes its letters too: -b 1K -e 16M -f 4 -n 20 -w 5 -d float -o sum -r 0 -c 1 -g RANKS -T SECONDS -J FILE -I.
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
    backends: str = "gloo,cairn"
    """which, of gloo, cairn, nccl and mpi; those that are not here are skipped, with the reason"""
    iters: int = 20
    """iterations of each size (-n)"""
    warmup_iters: int = 5
    """iterations before those (-w)"""
    datatype: Literal["float", "double", "half", "bfloat16", "int32", "int64", "uint8"] = "float"
    """of the elements (-d)"""
    op: Literal["sum", "prod", "min", "max", "avg"] = "sum"
    """reduction (-o)"""
    root: int = 0
    """of broadcast, reduce, gather and scatter (-r)"""
    check: int = 1
    """1: count wrong elements; 0: do not look (-c)"""
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
    spec, skipped = _spec(options)
    from cairn.comm.bench_ranks import run_ranks
    from cairn.comm.bench_report import document, lines, plots, wrong_of
    from cairn.comm.bench_sweep import measure

    for name, reason in skipped.items():
        sys.stderr.write(f"skipped {name}: {reason}\n")
    started = time.strftime(TIME_FORMAT)
    start = "spawn" if "nccl" in spec.backends else "fork"
    with progress(len(spec.sizes), options.operation) as advance:
        rows = run_ranks(
            options.ranks, measure, spec, timeout_s=3600, start=start,
            heard=lambda rank, size: advance(f"{spec.operation} {size}"),
        )[0]  # fmt: skip
    devices = [
        {"rank": rank, "device": rank, "device_info": "cpu"} for rank in range(options.ranks)
    ]
    written = document(
        spec, rows, options.ranks, args=["cairn", "comm", "bench", *args], started=started,
        ended=time.strftime(TIME_FORMAT), skipped=skipped, devices=devices,
    )  # fmt: skip
    if options.output_file is not None:
        options.output_file.write_bytes(msgspec.json.encode(written))
    if options.html is not None:
        options.html.write_text(plots(spec, rows, options.ranks, started))
        sys.stderr.write(f"wrote {options.html}\n")
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(written)).decode())
    else:
        print("\n".join(lines(spec, rows, options.ranks, options.per_iter)))
    return 1 if wrong_of(rows) else 0


def sizes_of(least: str, most: str, factor: int, step: str) -> list[int]:
    """From the least to the most, by a factor or a step. 1K is 1024 bytes, as nccl-tests has it."""
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
    found = []
    for arg in args:
        if arg in SHORT:
            found.append(SHORT[arg])
        elif arg[:2] in SHORT and len(arg) > 2 and arg[1] != "-":
            found += [SHORT[arg[:2]], arg[2:]]
        else:
            found.append(arg)
    return found


def _spec(options: Bench) -> tuple["Spec", dict[str, str]]:
    """What to measure, and which backends are not here; a mistake is refused before torch loads."""
    operation = options.operation.removesuffix("_perf")
    if operation not in OPERATIONS:
        raise UsageError(
            f"no collective '{options.operation}'",
            hint=did_you_mean(operation, OPERATIONS, f"one of {', '.join(OPERATIONS)}"),
        )
    if not 2 <= options.ranks <= MOST_RANKS:
        raise UsageError(f"{options.ranks} ranks", hint=f"2 to {MOST_RANKS} on one machine")
    if not 0 <= options.root < options.ranks:
        raise UsageError(f"rank {options.root} of {options.ranks} cannot be the root")
    if options.iters < 1 or options.warmup_iters < 0 or options.timeout <= 0:
        raise UsageError(
            f"{options.iters} iterations, {options.warmup_iters} before, {options.timeout} s",
            hint="one iteration or more, and a timeout above 0",
        )
    sizes = sizes_of(options.minbytes, options.maxbytes, options.stepfactor, options.stepbytes)
    asked = [name.strip() for name in options.backends.split(",") if name.strip()]
    for name in asked:
        if name not in BACKENDS:
            raise UsageError(
                f"no backend '{name}'", hint=did_you_mean(name, BACKENDS, f"one of {BACKENDS}")
            )
    if options.op == "avg" and options.datatype not in ("float", "double"):
        raise UsageError(
            f"an average of {options.datatype} is not exact", hint="use -d float, or another -o"
        )
    from cairn.comm.bench_sweep import Spec, missing

    skipped = {name: reason for name in asked if (reason := missing(name, options.ranks))}
    present = [name for name in dict.fromkeys(asked) if name not in skipped]
    if options.op == "avg" and "gloo" in present:
        skipped["gloo"] = "it has no average"
        present.remove("gloo")
    if not present:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise HardwareError(f"none of the backends is here ({reasons})", hint="use --backends gloo")
    return Spec(
        operation=OPERATIONS[operation],  # pyrefly: ignore
        backends=present, sizes=sizes, type=options.datatype, reduction=options.op,
        root=options.root, iterations=options.iters, warmup=options.warmup_iters,
        check=bool(options.check), timeout_s=options.timeout, master=("127.0.0.1", _free_port()),
    ), skipped  # fmt: skip


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
