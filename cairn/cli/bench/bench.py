"""`cairn bench`: measurements against ceilings and against the best that others have. Measures nothing itself."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cairn.cli.bench import (
    bench_comm,
    bench_context,
    bench_fleet,
    bench_serve,
    bench_train,
    throughput,
)
from cairn.cli.subverbs import Subverb, dispatch
from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.core.units import format_duration, format_rate
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.kernels.tooling.measure import Ceiling

ABOUT = "Measurements, each beside the limit of this machine and the best known alternative."


class BenchKernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Check and time every kernel on every shape, beside its anchors, in one run. Needs a CUDA device."""

    only: list[str] = []
    """measure these kernels, instead of all"""
    match: str = ""
    """only cases that have this in their kernel, shape or dtype"""
    out: Path | None = None
    """write the rows to this file, after each case"""
    merge: bool = False
    """with --out: keep the rows of the file that this run does not measure"""
    commit: str | None = None
    """the commit that runs, where there is no git"""
    budget_ms: float = 100.0
    """how long to time each call"""
    json: bool = False
    """print the whole document as JSON; lines go to stderr"""


def run(args: list[str]) -> int:
    return dispatch("bench", ABOUT, SUBVERBS, args)


def run_kernels(args: list[str]) -> int:
    options = load(BenchKernels, args=args, env_prefix="CAIRN_BENCH_KERNELS_").value
    if options.merge and options.out is None:
        raise UsageError("--merge is given without --out", hint="name the file with --out")
    from cairn.bench import kernels as bench
    from cairn.bench.record import origin, repeatable, require_commit
    from cairn.kernels.tooling.demo import line
    from cairn.kernels.tooling.measure import Row, measure_ceiling, require_gpu

    device = require_gpu()
    if options.out is not None:
        require_commit(options.commit)
    cases = bench.find_cases(options.only, options.match)
    if not cases:
        raise UsageError(f"no case has '{options.match}' in it", hint="try without --match")
    old = None
    if options.out is not None and options.merge and options.out.exists():
        old = bench.read(options.out)
    ceiling = measure_ceiling(sorted({case.dtype for case in cases}))
    _log_line(f"{device}: {_limits(ceiling)}; {len(cases)} cases", options)
    source = origin(repeatable(["bench", "kernels"], args), device, options.commit)
    rows: list[Row] = []
    began = time.perf_counter()
    with progress(len(cases), "measuring") as advance:
        for row in bench.measure_all(cases, ceiling, options.budget_ms):
            rows.append(row)
            _log_line(f"{line(row)} {_left(began, len(rows), len(cases))}", options)
            if options.out is not None:
                bench.write(bench.report(source, ceiling, rows, old), options.out)
            advance(f"{row.kernel} {row.shape}")
    if options.json:
        document = bench.report(source, ceiling, rows, old)
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    failures = sum(row.failure is not None for row in rows)
    _log_line(f"{len(rows)} cases, {failures} failed", options)
    return 1 if failures else 0


def _log_line(text: str, options: BenchKernels) -> None:
    # sys.stdout is looked up anew: a progress bar puts something else there.
    print(text, file=sys.stderr if options.json else sys.stdout, flush=True)


def _limits(ceiling: "Ceiling") -> str:
    rates = [f"{name} {format_rate(rate, 'FLOP')}" for name, rate in ceiling.flops_per_s.items()]
    return ", ".join([f"copy {format_rate(ceiling.bytes_per_s, 'B')}", *rates])


def _left(began: float, done: int, total: int) -> str:
    """[3/80, 2m 05s left]"""
    if done == total:
        return f" [{done}/{total}]"
    seconds = (time.perf_counter() - began) / done * (total - done)
    return f" [{done}/{total}, {format_duration(round(seconds))} left]"


SUBVERBS = {
    "serve": Subverb(
        bench_serve.run, "load on a running server, ours or another: latencies, goodput"
    ),
    "fleet": Subverb(bench_fleet.run, "what the router costs per request and per event"),
    "throughput": Subverb(
        throughput.run, "the engine on whole workloads, beside the limit of the machine"
    ),
    "context": Subverb(
        bench_context.run, "time to the first token and per token, as the prompt grows"
    ),
    "train": Subverb(
        bench_train.run, "whole training steps: tokens/s, MFU and memory on one device"
    ),
    "comm": Subverb(
        bench_comm.run, "transfer of KV and weights between processes: GB/s by transport"
    ),
    "kernels": Subverb(run_kernels, "every kernel, beside cuBLAS, cuDNN and torch.compile"),
}
