"""Predicted beside measured: the records of benchmarks/ on an H200, and what the planner says about the same cases.

    throughput.json   five workloads, two models      serve.json      a server under load
    training.json     single-GPU training, memory     published.py    other people's training on several GPUs

Reads the records where the checkout has them and says nothing where not. The constants of the cost functions were
chosen with most of these records in view, so an error here is how well one set of constants explains all of them, not
a forecast of a machine that was not measured.
"""

import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cairn.core.errors import CairnError
from cairn.models.presets import PRESETS, preset, with_layers
from cairn.plan.device import device
from cairn.plan.published import TITAN_AGAIN, Compared, Published, compare_one
from cairn.plan.serve_cost import Served
from cairn.plan.serve_load import STEP_MS, Traced, Workload, run
from cairn.plan.train_cost import Choice, Job, step_time
from cairn.plan.train_memory import rank_memory
from cairn.train.parallel.layout import Layout
from cairn.train.recompute_kinds import KINDS

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks" / "h200"

# The workloads of `cairn bench throughput`, by their lengths.
WORKLOADS = {
    "nano": Workload(
        requests=256, input_least=100, input_most=1024, output_least=100, output_most=1024
    ),
    "latency": Workload(
        requests=1, input_least=128, input_most=128, output_least=256, output_most=256
    ),
    "prefill": Workload(
        requests=64, input_least=2048, input_most=2048, output_least=1, output_most=1
    ),
    "decode": Workload(
        requests=256, input_least=1024, input_most=1024, output_least=256, output_most=256
    ),
    "shared": Workload(
        requests=256,
        input_least=2048,
        input_most=2048,
        output_least=64,
        output_most=64,
        shared=1792,
    ),
}


def serving(records: Path = RECORDS, only: str | None = None) -> list[Compared]:
    """Tokens per second of each workload, and latencies under load; `only` one model."""
    rows = []
    for row in _rows(records / "throughput.json"):
        if (
            row.get("failure")
            or row.get("plain")
            or row.get("dtype") != "bf16"
            or any(row.get(other) for other in ("quantization", "kv_cache", "head", "speculate"))
            or not _wanted(row, only)
        ):
            continue
        workload = WORKLOADS.get(row.get("workload", ""))
        if workload is None or row.get("scale", 1.0) != 1.0:
            continue
        load = run(Served(spec=preset(row["shape"]), device=device("h200")), workload)
        prompts = row["workload"] == "prefill"
        key = "input_tokens_per_s" if prompts else "output_tokens_per_s"
        what = f"{row['shape']} {row['workload']}, {'prompt ' if prompts else ''}tokens/s"
        rows.append(Compared(what=what, measured=row[key], predicted=getattr(load, key)))
    for row in _rows(records / "serve.json"):
        if (
            _wanted(row, only)
            and row.get("workload") == "random, 1024 in, 128 out"
            and row.get("label") == "cairn"
        ):
            rows += _under_load(row)
    return rows


def arrivals(rate: float, count: int) -> list[float]:
    """The moments at which `cairn bench serve` sends its requests, seed 0; a test holds the two together."""
    draw = random.Random("arrivals 0")
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


def _under_load(row: dict[str, Any]) -> list[Compared]:
    """The requests that were measured, each at its moment: near saturation another draw is another queue."""
    moments = arrivals(row["rate"], row["requests"])
    trace = tuple(Traced(moment, [number] * 1024, 128) for number, moment in enumerate(moments))
    workload = Workload(
        requests=len(trace),
        rate=(len(trace) - 1) / (moments[-1] - moments[0]),
        trace=trace,
        input_least=1024,
        input_most=1024,
        output_least=128,
        output_most=128,
    )
    load = run(Served(spec=preset(row["shape"]), device=device("h200")), workload, step_ms=STEP_MS)
    name = f"{row['shape']} served at {row['rate']:g}/s"
    predicted = {
        "tpot_ms": {"p50": load.tpot_p50, "p99": load.tpot_p99},
        "ttft_ms": {"p50": load.ttft_p50, "p99": load.ttft_p99},
    }
    rows = [
        Compared(
            what=f"{name}, tokens/s",
            measured=row["output_tokens_per_s"],
            predicted=load.output_tokens_per_s,
        )
    ]
    for what, shares in predicted.items():
        for share, seconds in shares.items():
            words = f"{name}, {share} {what[:4].upper()} ms"
            rows.append(Compared(what=words, measured=row[what][share], predicted=1e3 * seconds))
    return rows


def training(records: Path = RECORDS, only: str | None = None) -> list[Compared]:
    """Tokens per second of our trainer on one GPU."""
    rows = []
    for what, row, job, choice in _trained(records, only):
        rate = row["seq"] * row["batch"] / step_time(job, choice, device("h200")).total()
        rows.append(
            Compared(what=f"{what}, tokens/s", measured=row["tokens_per_s"], predicted=rate)
        )
    return rows


def training_memory(records: Path = RECORDS, only: str | None = None) -> list[Compared]:
    """The peak of its memory, in GiB; of the fused form, which is what plans are made for."""
    return [
        Compared(
            what=f"{what}, GiB",
            measured=row["peak_gib"],
            predicted=rank_memory(job, choice).total() / 2**30,
        )
        for what, row, job, choice in _trained(records, only)
        if row.get("peak_gib") and job.kernels == "fused"
    ]


def _trained(records: Path, only: str | None) -> Iterator[tuple[str, dict[str, Any], Job, Choice]]:
    """The runs of the record that the planner has a name for."""
    for row in _rows(records / "training.json"):
        if row.get("failure") or row.get("tokens_per_s") is None or row.get("model") not in PRESETS:
            continue
        if (only is not None and row["model"] != only) or row.get("recompute") not in KINDS:
            continue
        if row.get("lora"):  # frozen weights have neither gradients nor states
            continue
        spec = preset(row["model"])
        if row.get("layers"):  # the first ones alone
            spec = with_layers(spec, row["layers"])
        job = Job(
            spec=spec,
            sequence=row["seq"],
            sequences=row["batch"],
            fp8="fp8" in row["dtype"],
            kernels="plain" if row.get("plain") else "fused",
            states=row.get("states", "float32"),
        )
        choice = Choice(layout=Layout(), microbatch=row["microbatch"], recompute=row["recompute"])
        size = f"seq {row['seq']} x {row['batch']}"
        size += f", {row['layers']} layers" if row.get("layers") else ""
        yield (
            f"{row['model']} {row['dtype']} {size}, recompute {row['recompute']}",
            row,
            job,
            choice,
        )


def torchtitan_here() -> list[Compared]:
    """torchtitan 0.2.2 on the same kind of GPU: sequence 4096, batch 8, compiled, cuDNN's attention, AdamW."""
    rows = (
        ("qwen3-0.6b", "none", 90_000),
        ("qwen3-1.7b", "none", 45_200),
        ("qwen3-1.7b", "selective", 41_100),
    )
    compared = []
    for model, recompute, tokens in rows:
        case = Published(
            what=f"{model}, torchtitan on an H200, recompute {recompute}, tokens/s",
            gpu="h200",
            model=model,
            sequence=4096,
            microbatch=8,
            tokens_per_s=tokens,
            layout=Layout(),
            recompute=recompute,
            products_again=TITAN_AGAIN if recompute == "selective" else 0.0,
        )
        compared.append(compare_one(case))
    return compared


def median_error(rows: Iterable[Compared]) -> float | None:
    errors = [abs(row.error) for row in rows]
    return statistics.median(errors) if errors else None


def document(compared: Mapping[str, Sequence[Compared]]) -> dict[str, Any]:
    """Document for --json."""
    sections = {}
    for name, rows in compared.items():
        lines = [msgspec.to_builtins(row) | {"error": row.error} for row in rows]
        sections[name] = {"median_error": median_error(rows), "rows": lines}
    return sections


def _wanted(row: dict[str, Any], only: str | None) -> bool:
    shape = row.get("shape")
    return shape in PRESETS and (only is None or shape == only)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a record; empty if it is absent, an error if it is damaged."""
    if not path.exists():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("rows", [])
    except (msgspec.DecodeError, OSError) as error:
        raise CairnError(
            f"cannot read {path}: {error}", hint="make it again with `cairn bench`"
        ) from None
