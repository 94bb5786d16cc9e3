"""Latency of a single request by prompt length: time to the first token and per token.

    for each length: a prompt of so many tokens into an idle engine with an empty prefix cache -> one Row

Beside both times stands the least that this machine needs for them: the prompt's FLOPs or bytes at the measured
ceilings, and for a token the weights and the cache that it reads. A length beyond what the model was made for needs
`--context`-style stretching, which `prepare` does. Prints nothing.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cairn.bench import record
from cairn.bench.engine_run import submit
from cairn.bench.record import RecordOrigin, merged
from cairn.bench.throughput import ThroughputBench
from cairn.bench.workload import LARGEST_TOKEN
from cairn.bench.workload_request import WorkloadRequest
from cairn.core.errors import UsageError
from cairn.core.garbage_collection import quiet_collector
from cairn.kernels.tooling.measure import Ceiling
from cairn.models.step_cost import SequenceWork, step_cost

GPU_LENGTHS = (1024, 4096, 8192, 16384, 32768, 65536, 131072)
CPU_LENGTHS = (64, 128, 256)
STEP = 7919  # a prime: no two prompts of these lengths begin alike


class ContextRow(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one length of one model, in seconds. `failure` is the reason why a row has no times."""

    shape: str
    dtype: str
    length: int
    output_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_floor_s: float = 0.0
    tpot_floor_s: float = 0.0
    quantization: str = ""
    kv_cache: str = ""
    failure: str | None = None
    commit: str = ""


class ContextReport(RecordOrigin, frozen=True, kw_only=True):
    """benchmarks/h200/context.json."""

    ceilings: dict[str, Ceiling]
    rows: list[ContextRow]


def check_lengths(lengths: Sequence[int], output: int) -> None:
    if not lengths or min(lengths) < 1:
        raise UsageError(f"the lengths are {list(lengths)}", hint="each is at least 1 token")
    if output < 2:
        raise UsageError(
            f"--output-len is {output}", hint="at least 2: the time per token is between two tokens"
        )


def measure(bench: ThroughputBench, length: int, output: int) -> ContextRow:
    """A short run first, so that every kernel and graph of this length has been made."""
    blank = ContextRow(
        shape=bench.setup.shape,
        dtype=bench.dtype,
        length=length,
        output_tokens=output,
        ttft_floor_s=_floor(bench, SequenceWork(length, 0, 1)),
        tpot_floor_s=_floor(bench, SequenceWork(1, length + output // 2, 1)),
        quantization=bench.setup.quantization,
        kv_cache=bench.setup.kv_cache,
    )
    vocabulary = min(bench.spec.vocab, LARGEST_TOKEN)
    prompt = [(length + place * STEP) % vocabulary for place in range(length)]
    for _ in range(2):  # a prefill shape is captured when it comes up for the second time
        _timed(bench, WorkloadRequest(prompt, 2))
    first_s, whole_s, failure = _timed(bench, WorkloadRequest(prompt, output))
    if failure is not None:
        return msgspec.structs.replace(blank, failure=failure)
    per_token = (whole_s - first_s) / (output - 1)
    return msgspec.structs.replace(blank, ttft_s=first_s, tpot_s=per_token)


def _timed(bench: ThroughputBench, one: WorkloadRequest) -> tuple[float, float, str | None]:
    """Seconds to the first token and to the last one, and why there was none."""
    engine = bench.engine
    engine.scheduler.blocks.reset()
    with quiet_collector():
        began = time.perf_counter()
        request = submit(engine, [one])[0]
        first = 0.0
        while engine.has_work:
            engine.step()
            if not first and request.outputs:
                first = time.perf_counter() - began
        whole = time.perf_counter() - began
    done = len(request.outputs) == one.output
    return first, whole, None if done else request.error or "it ended early"


def _floor(bench: ThroughputBench, work: SequenceWork) -> float:
    return bench.ceiling.floor_s(step_cost(bench.spec, [work], *reversed(bench.each)), bench.rate)


def report(
    origin: RecordOrigin,
    ceilings: dict[str, Ceiling],
    rows: Sequence[ContextRow],
    old: ContextReport | None = None,
) -> ContextReport:
    return ContextReport(
        ceilings={**(old.ceilings if old else {}), **ceilings},
        **merged(origin, rows, old, _key, lambda row: row.shape),
    )


def _key(row: ContextRow) -> tuple[object, ...]:
    form = (row.dtype, row.quantization, row.kv_cache)
    return row.shape, row.length, row.output_tokens, *form


def read(path: Path) -> ContextReport:
    return record.read(path, ContextReport, "context")
