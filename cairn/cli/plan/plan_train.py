"""`cairn plan train`: which layout trains a model fastest on these GPUs. Prints; `cairn.plan` decides."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import tyro

from cairn.cli.learn.lab import require_place
from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.core.prose import in_terminal
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.plan.device import Device
    from cairn.plan.published import Compared
    from cairn.plan.train_cost import Job
    from cairn.plan.train_search import TrainPlan


AXES = ("dp", "fsdp", "pp", "cp", "tp", "ep")
SHOWN_REASONS = 5  # of each kind
MOST_GPUS = 131_072
MOST_TOKENS = 1 << 30  # of a step


class PlanTrain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Search dp x fsdp x pp x cp x tp x ep, recomputation and microbatch; the best ten, and why the others lost."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """a shape, such as qwen3-8b; a packaged model, such as cairn-tiny; a folder with a config.json; a GGUF file; or
    owner/name on the hub, whose config.json is fetched"""
    gpus: int = 8
    """how many"""
    gpu: str = "h200"
    """h200, h100, h100-500w, a100, a100-40gb or b200"""
    sequence: int = 4096
    """tokens of a sample"""
    batch_tokens: int = 4_194_304
    """tokens of a step, all GPUs together"""
    fp8: bool = False
    """products of the layers in 8 bits"""
    states: Literal["float32", "bfloat16", "int8"] = "float32"
    """what the optimizer remembers; bfloat16 does without masters"""
    dp: int | None = None
    """only layouts with so many replicas; so for the next ones"""
    fsdp: int | None = None
    """ranks that cut weights and states"""
    pp: int | None = None
    """stages of a pipeline"""
    cp: int | None = None
    """ranks that share a sequence"""
    tp: int | None = None
    """ranks that share each layer"""
    ep: int | None = None
    """ranks that share the experts"""
    tokens: float = 1e12
    """of the whole run, for time, cost and energy"""
    gpus_per_node: int = 8
    """joined by NVLink"""
    nic: float | None = None
    """GB/s of the network for each GPU; default: 25 for A100, else 50"""
    price: float | None = None
    """USD for one GPU and hour"""
    html: Path | None = None
    """write one self-contained page to this file"""
    json: bool = False
    """print one JSON document"""


def run(args: list[str]) -> int:
    options = load(PlanTrain, args=args, env_prefix="CAIRN_PLAN_TRAIN_").value
    from cairn.plan import measured, page, published
    from cairn.plan.device import device
    from cairn.plan.model_shape import model_shape
    from cairn.plan.train_cost import Job
    from cairn.plan.train_search import layouts, search

    name, spec, *_ = model_shape(options.model)
    _check(options, spec.context)
    given = {"nic_gb_per_s": options.nic, "usd_per_hour": options.price}
    changes = {field: value for field, value in given.items() if value is not None}
    gpu = msgspec.structs.replace(
        device(options.gpu, **changes), gpus_per_node=options.gpus_per_node
    )
    sequences = options.batch_tokens // options.sequence
    if options.fp8 and gpu.fp8_flops_per_s <= gpu.flops_per_s:
        raise UsageError(
            f"--fp8: {gpu.name} has no fp8 products", hint="another --gpu, or leave it out"
        )
    job = Job(
        spec=spec,
        sequence=options.sequence,
        sequences=sequences,
        fp8=options.fp8,
        states=options.states,
    )
    pins = {axis: size for axis in AXES if (size := getattr(options, axis)) is not None}
    began = time.perf_counter()
    with progress(sum(1 for _ in layouts(spec, options.gpus, pins)), "searching") as advance:
        plan = search(job, options.gpus, gpu, pins, advance)
    seconds = time.perf_counter() - began
    compared = {
        "Training on one H200": measured.training() + measured.torchtitan_here(),
        "Memory of training on one H200": measured.training_memory(),
        "Published, several GPUs": published.compare(),
    }
    notes = [*_batch_notes(options, sequences), gpu.words(), _rates_note(job, gpu)]
    cost = _cost(options, plan)
    if options.html is not None:
        title = f"{name} on {options.gpus} {gpu.name}"
        write_page(options.html, page.train_page(title, notes, job, plan, cost, compared))
    if options.json:
        _print_json(_document(options, gpu, plan, seconds, compared))
    else:
        _print(options, plan, notes, cost, compared, seconds)
    return 0 if plan.rows else 1


def _rates_note(job: "Job", gpu: "Device") -> str:
    """Note about the fp8 rate and the peak that MFU refers to."""
    from cairn.plan.train_cost import FP8

    mfu = f"MFU is of the bf16 peak, {gpu.peak_flops_per_s / 1e12:,.0f} TFLOP/s"
    if not job.fp8:
        return mfu
    scaled, plain = FP8 * gpu.fp8_flops_per_s / 1e12, gpu.fp8_flops_per_s / 1e12
    return (
        f"fp8: {plain:,.0f} TFLOP/s in products of the layers, {scaled:,.0f} with scaling and casts; {mfu}, "
        "so that rows compare with bf16"
    )


def _batch_notes(options: PlanTrain, sequences: int) -> list[str]:
    """Notes about the batch size, and the nearest one that lets data parallelism use all GPUs."""
    held = sequences * options.sequence
    noun = "sequence" if sequences == 1 else "sequences"
    step = f"{sequences:,} {noun} of {options.sequence:,} = {held:,} tokens a step"
    rest = options.batch_tokens - held
    notes = [f"{step}: --batch-tokens {options.batch_tokens} has {rest:,} more" if rest else step]
    alone = all(getattr(options, axis) in (None, 1) for axis in ("pp", "cp", "tp"))
    if alone and sequences > options.gpus and sequences % options.gpus:
        near = round(sequences / options.gpus) * options.gpus
        notes.append(
            f"{sequences:,} sequences do not divide by {options.gpus:,} GPUs, so dp * fsdp cannot be "
            f"{options.gpus:,}; with --batch-tokens {near * options.sequence} ({near:,} sequences) it can"
        )
    return notes


def write_page(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="another --html") from None
    print(f"wrote {path}", file=sys.stderr)


def _check(options: PlanTrain, context: int) -> None:
    for name in ("gpus", "sequence", "batch_tokens", "gpus_per_node", *AXES):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}", hint="at least 1")
    if options.gpus > MOST_GPUS:
        raise UsageError(f"--gpus is {options.gpus}", hint=f"at most {MOST_GPUS:,}")
    if options.batch_tokens < options.sequence:
        raise UsageError(
            f"--batch-tokens {options.batch_tokens} is less than one sample of {options.sequence}",
            hint="a step has one sample at least",
        )
    if options.batch_tokens > MOST_TOKENS:
        raise UsageError(
            f"--batch-tokens is {options.batch_tokens}", hint=f"at most {MOST_TOKENS:,}"
        )
    if options.sequence > context:
        raise UsageError(
            f"--sequence {options.sequence} is longer than the {context} tokens of {options.model}",
            hint=f"at most {context}",
        )
    for name in ("tokens", "nic", "price"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name} is {value}", hint="above 0")
    if options.html is not None:
        require_place(options.html)


def _cost(options: PlanTrain, plan: "TrainPlan") -> dict[str, str]:
    from cairn.core.units import format_duration

    if not plan.rows:
        return {}
    seconds, usd, kwh = figures(options.tokens, options.gpus, plan)
    return {
        f"{options.tokens:.3g} tokens take": format_duration(seconds),
        "they cost": f"USD {usd:,.0f}",
        "energy": f"{kwh:,.0f} kWh",
    }


def figures(tokens: float, gpus: int, plan: "TrainPlan") -> tuple[float, float, float]:
    """Seconds, USD and kWh of a run with the best layout, without failures (see `cairn simulate failures`)."""
    seconds = tokens / plan.rows[0].tokens_per_s
    hours = gpus * seconds / 3600
    return seconds, hours * plan.device.usd_per_hour, hours * plan.device.watts / 1000


def _document(
    options: PlanTrain,
    gpu: "Device",
    plan: "TrainPlan",
    seconds: float,
    compared: "dict[str, list[Compared]]",
) -> dict[str, Any]:
    from cairn.plan import measured

    rows = []
    for row in plan.rows:
        rows.append({
            "words": row.choice.words(), "choice": row.choice, "tokens_per_s": row.tokens_per_s,
            "tokens_per_s_per_gpu": row.tokens_per_s / options.gpus, "mfu": row.mfu, "step_s": row.seconds,
            "memory_bytes": row.memory.table() | {"total": row.memory.total()}, "time_s": row.time.table(),
            "why_not": row.why, "flags": row.flags,
        })  # fmt: skip
    document: dict[str, Any] = {
        "model": options.model, "gpus": options.gpus, "device": gpu, "tried": plan.tried, "fit": plan.fitting,
        "search_s": seconds, "best": rows, "lost": plan.lost,
        "compared": measured.document(compared),
    }  # fmt: skip
    if plan.rows:
        spent, usd, kwh = figures(options.tokens, options.gpus, plan)
        document["run"] = {"tokens": options.tokens, "seconds": spent, "usd": usd, "kwh": kwh}
    return document


def _print(
    options: PlanTrain,
    plan: "TrainPlan",
    notes: list[str],
    cost: dict[str, str],
    compared: "dict[str, list[Compared]]",
    seconds: float,
) -> None:
    print(
        f"{options.model} on {options.gpus} x {plan.device.name}: "
        f"{plan.tried:,} ways tried in {seconds:.1f} s, {plan.fitting:,} fit"
    )
    print("\n".join(notes) + "\n")
    _print_best(plan, cost)
    _print_losses(plan)
    _print_errors(compared)


def _print_best(plan: "TrainPlan", cost: dict[str, str]) -> None:
    from cairn.cli.columns import lines
    from cairn.core.units import format_bytes
    from cairn.plan.page import TRAIN_HEADINGS, train_cells

    if plan.rows:
        print("\n".join(lines(TRAIN_HEADINGS, [train_cells(row) for row in plan.rows])))
        memory = plan.rows[0].memory
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.table().items())
        print(f"\nto run the first: cairn train RECIPE {plan.rows[0].flags}")
        print(in_terminal(f"memory of a rank of the first: {parts}"))
        print(in_terminal("; ".join(f"{name} {value}" for name, value in cost.items())))
    else:
        large = any(row.kind == "too large" for row in plan.lost)
        way_out = "take more GPUs, a shorter sequence or smaller steps" if large else "see why"
        print(f"nothing {'fits' if large else 'can run'}: {way_out}")


def _print_losses(plan: "TrainPlan") -> None:
    from cairn.plan.train_search import KINDS_OF_LOSS

    print("\nwhy the others lost")
    for kind in KINDS_OF_LOSS:
        rows = [row for row in plan.lost if row.kind == kind]
        for row in rows[:SHOWN_REASONS]:
            such = f"{kind}: {row.reason} (such as {row.example})"
            print(in_terminal(f"{row.count:>7,}  {such}", " " * 9))
        more = rows[SHOWN_REASONS:]
        if more:
            struck = sum(row.count for row in more)
            which = f"{len(more)} more reason{'s' * (len(more) > 1)}"
            print(f"{struck:>7,}  {kind}: {which}; --json and --html have all")


def _print_errors(compared: "dict[str, list[Compared]]") -> None:
    """Print the prediction errors."""
    from cairn.plan.measured import median_error

    for name, found in compared.items():
        error = median_error(found)
        if error is not None:
            worst = max(found, key=lambda row: abs(row.error))
            largest = f"largest {worst.error:+.1%} ({worst.what})"
            said = f"{name}: median error {error:.1%} of {len(found)}, {largest}"
            print("\n" + in_terminal(said))


def _print_json(document: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(document)).decode())
