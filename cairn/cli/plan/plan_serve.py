"""`cairn plan serve`: how many GPUs serve a model at this rate, and how fast. Prints; `cairn.plan` decides."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import tyro

from cairn.cli.learn.lab import require_place
from cairn.cli.plan.plan_train import write_page
from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.core.prose import in_terminal
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.models.spec import ModelSpec
    from cairn.models.vision.spec import VisionSpec
    from cairn.plan.published import Compared
    from cairn.plan.serve_plan import Demand, ServePlan

RATE = 10.0  # requests a second, by default
TRACED = 500  # requests of a trace, by default
LENGTHS = 1024, 256  # tokens in and out, by default, if the model has room for them
SPREAD = 1.25  # the longest are so many times the usual
ARENA_ROWS = 16384  # as the engine has them on a GPU
LEAST_REQUESTS, MOST_REQUESTS = 20, 100_000

CACHES = ("auto", "fp8", "fp8_e4m3")


class PlanServe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Simulate the real scheduler at a rate: does it fit, latency under load, GPUs, cost and energy."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """a shape, such as qwen3-8b; a packaged model, such as cairn-tiny; a folder with a config.json; a GGUF file; or
    owner/name on the hub, whose config.json is fetched"""
    gpu: str = "h200"
    """h200, h100, h100-500w, a100, a100-40gb or b200"""
    rate: float | None = None
    """requests a second: 10, Poisson; of a trace its own, or the same pattern at this rate"""
    trace: Path | None = None
    """lengths and times of a real service: Mooncake's JSONL or Azure's CSV, as for `cairn bench serve`"""
    requests: int | None = None
    """how many are simulated: 200, fewer if they are long; of a trace the first 500"""
    gpus: int = 64
    """at most so many"""
    input_tokens: int | None = None
    """of a prompt, a quarter more or less: 1024, fewer if the model's context is short"""
    images: int = 0
    """pictures of a prompt, for a model that sees; their tokens come on top of --input-tokens"""
    image_size: str = "560x560"
    """pixels of a picture"""
    output_tokens: int | None = None
    """of an answer, a quarter more or less: 256, or likewise fewer"""
    slo_ttft_ms: float = 500.0
    """p99 until the first token"""
    slo_tpot_ms: float = 50.0
    """p99 between tokens"""
    slo: str | None = None
    """both at once, as for `cairn serve`: ttft=500ms,tpot=50ms"""
    quantization: str = ""
    """form of the weights: bf16, fp8, w8a8, w8a16, w4a16, mxfp4, nvfp4, q4_k, q6_k, q8_0; default: that of the file"""
    kv_cache_dtype: str = "auto"
    """auto or fp8: of keys and values"""
    fp8: bool = False
    """the same as --quantization fp8"""
    price: float | None = None
    """USD for one GPU and hour"""
    measured: bool = True
    """show predictions beside this project's measurements of the model, where there are any"""
    html: Path | None = None
    """write one self-contained page to this file"""
    json: bool = False
    """print one JSON document"""


def run(args: list[str]) -> int:
    options = load(PlanServe, args=args, env_prefix="CAIRN_PLAN_SERVE_").value
    from cairn.plan import measured, page
    from cairn.plan.device import device
    from cairn.plan.model_shape import model_shape
    from cairn.plan.serve_cost import Served
    from cairn.plan.serve_plan import plan, sizes
    from cairn.plan.weight_forms import BF16, weight_form

    if options.slo is not None:
        options = _with_slo(options, options.slo)
    _check(options)
    name, spec, stored, vision = model_shape(options.model)
    options, media, seen = _with_images(options, spec, vision)
    form = weight_form("fp8" if options.fp8 else options.quantization, stored)
    gpu = device(
        options.gpu, **({"usd_per_hour": options.price} if options.price is not None else {})
    )
    demand, note = _demand(options, spec)
    served = Served(
        spec=spec,
        device=gpu,
        weight_bytes=form.bytes,
        eight_bit=form.eight_bit,
        cache_bytes=2.0 if options.kv_cache_dtype == "auto" else 1.0,
        **media,
    )
    with progress(len(sizes(served, options.gpus)), "simulating") as advance:
        found = plan(served, demand, options.gpus, advance)
    rows = measured.serving(only=name) if options.measured and gpu.name == "h200" else []
    compared = {"Measured on one H200": rows}
    slo = f"p99 TTFT {options.slo_ttft_ms:g} ms and TPOT {options.slo_tpot_ms:g} ms"
    notes = [f"{note}, {slo}", gpu.words(), *seen]
    if form is not BF16:
        notes.append(f"weights as {form.name}: {form.bits:g} bits in the layers, 16 outside")
    if options.html is not None:
        title = f"{name} served by {gpu.name}"
        write_page(options.html, page.serve_page(title, notes, found, compared))
    if options.json:
        print(
            msgspec.json.format(msgspec.json.encode(_document(options, found, compared))).decode()
        )
    else:
        _print(options, found, notes, compared)
    return 0 if found.best is not None else 1


def _with_slo(options: PlanServe, slo: str) -> PlanServe:
    from cairn.plan.slo import parse_slo

    both = parse_slo(slo)
    limits = {"slo_ttft_ms": both.ttft_s * 1e3, "slo_tpot_ms": both.tpot_s * 1e3}
    return msgspec.structs.replace(options, **limits)


def _with_images(
    options: PlanServe, spec: "ModelSpec", vision: "VisionSpec | None"
) -> tuple[PlanServe, dict[str, Any], list[str]]:
    """Prompts with the tokens of their pictures, what their tower costs, and that in words."""
    from cairn.core.units import format_bytes
    from cairn.models.vision.cost import (
        patches_of_rows,
        picture_rows,
        tower_flops,
        tower_parameters,
    )

    if vision is None:
        if options.images:
            raise UsageError(
                f"--images is {options.images}, and {options.model} reads text only",
                hint="give a folder of a model that sees, with its config.json",
            )
        options, fitted = _with_lengths(options, spec.context)
        return options, {}, fitted
    sides = options.image_size.split("x")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise UsageError(f"--image-size is {options.image_size}", hint="such as 560x560")
    rows = picture_rows(vision, int(sides[1]), int(sides[0]))
    flops = tower_flops(vision, patches_of_rows(vision, rows))
    arena = min(ARENA_ROWS, spec.context) * spec.hidden * (1 + spec.deep_rows) * 2
    held = 2 * tower_parameters(vision) + arena
    options, fitted = _with_lengths(options, spec.context, options.images * rows)
    tokens = (options.input_tokens or 0) + options.images * rows
    media = {"tower_bytes": held, "tower_flops": options.images * flops / tokens}
    said = f"a tower and room for rows of pictures: {format_bytes(held)}; a picture of {options.image_size} is {rows} "
    said += f"tokens and {flops / 1e12:.2f} TFLOPs of the tower"
    return msgspec.structs.replace(options, input_tokens=tokens), media, [*fitted, said]


def _with_lengths(
    options: PlanServe, context: int, pictures: int = 0
) -> tuple[PlanServe, list[str]]:
    """The lengths that were not given, in the usual proportion where the usual ones do not fit; and that in words."""
    given = (options.input_tokens, options.output_tokens)
    room = int(context / SPREAD) - pictures - sum(length or 0 for length in given)
    wanted = sum(usual for usual, length in zip(LENGTHS, given, strict=True) if length is None)
    share = max(0.0, min(1.0, room / wanted)) if wanted else 1.0
    tokens = [
        length or max(1, int(usual * share)) for usual, length in zip(LENGTHS, given, strict=True)
    ]
    options = msgspec.structs.replace(options, input_tokens=tokens[0], output_tokens=tokens[1])
    if share == 1 or options.trace is not None:
        return options, []
    usual = f"{LENGTHS[0]} in and {LENGTHS[1]} out"
    said = f"lengths that fit the {context:,} tokens of {options.model}, where {usual} are usual; "
    return options, [said + "choose them with --input-tokens and --output-tokens"]


def _check(options: PlanServe) -> None:
    lengths, limits = ("input_tokens", "output_tokens"), ("slo_ttft_ms", "slo_tpot_ms")
    for name in ("rate", "gpus", "requests", "price", *lengths, *limits):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} is {value}", hint="above 0")
    if options.images < 0:
        raise UsageError(f"--images is {options.images}", hint="0 or more")
    if options.images and options.trace is not None:
        raise UsageError(
            f"--images is {options.images}, and the prompts of --trace have lengths of their own",
            hint="leave one of them out",
        )
    if options.kv_cache_dtype not in CACHES:
        raise UsageError(
            f"--kv-cache-dtype is {options.kv_cache_dtype}", hint=f"one of {', '.join(CACHES)}"
        )
    if options.requests is not None and not LEAST_REQUESTS <= options.requests <= MOST_REQUESTS:
        raise UsageError(
            f"--requests is {options.requests}",
            hint=f"{LEAST_REQUESTS} to {MOST_REQUESTS:,}: of fewer there is no p99",
        )
    if options.html is not None:
        require_place(options.html)


def _demand(options: PlanServe, spec: "ModelSpec") -> "tuple[Demand, str]":
    """Demand on the servers, and its description."""
    from cairn.plan.serve_plan import Demand, usual_requests

    slo: dict[str, Any] = {
        "slo_ttft": options.slo_ttft_ms / 1e3,
        "slo_tpot": options.slo_tpot_ms / 1e3,
    }
    if options.trace is not None:
        return _traced(options, spec, slo)
    assert options.input_tokens is not None
    assert options.output_tokens is not None
    longest = int(SPREAD * options.input_tokens) + int(SPREAD * options.output_tokens)
    if longest > spec.context:
        raise UsageError(
            f"requests of up to {longest:,} tokens are longer than the {spec.context:,} of {options.model}",
            hint="use a smaller --input-tokens or --output-tokens; lengths vary by a quarter",
        )
    demand = Demand(
        rate=RATE if options.rate is None else options.rate,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        requests=options.requests or usual_requests(options.input_tokens, options.output_tokens),
        **slo,
    )
    sizes = f"{options.input_tokens} tokens in and {options.output_tokens} out"
    return demand, f"{demand.rate:g} requests/s of {sizes} ({demand.requests} simulated)"


def _traced(options: PlanServe, spec: "ModelSpec", slo: dict[str, Any]) -> "tuple[Demand, str]":
    from cairn.bench.arrival_traces import read_trace
    from cairn.bench.load_prompts import LARGEST_VOCAB, asks, traced_shapes
    from cairn.plan.serve_load import Traced
    from cairn.plan.serve_plan import Demand

    assert options.trace is not None
    whole = read_trace(options.trace)
    taken = whole[: options.requests or TRACED]
    shapes = asks(traced_shapes(taken), "tokens", min(LARGEST_VOCAB, spec.vocab), "plan")
    trace = tuple(
        Traced(one.at_s, [int(token) for token in ask.prompt], ask.output_tokens)
        for one, ask in zip(taken, shapes, strict=True)
    )
    span = trace[-1].at_s
    if options.rate is None and not span:
        raise UsageError(
            f"the {len(trace)} requests of {options.trace} come at one moment",
            hint="give --rate, or more of them with --requests",
        )
    demand = Demand(
        rate=(len(trace) - 1) / span if options.rate is None else options.rate,
        trace=trace,
        input_tokens=max(1, sum(len(one.prompt) for one in trace) // len(trace)),
        output_tokens=max(1, sum(one.output_tokens for one in trace) // len(trace)),
        **slo,
    )
    note = f"the first {len(trace):,} of {len(whole):,} requests of {options.trace.name} at {demand.rate:.3g}/s"
    long = sum(len(one.prompt) + one.output_tokens > spec.context for one in trace)
    if long:
        note += f" ({long:,} are longer than the {spec.context:,} tokens of the model, and refused)"
    return (
        demand,
        f"{note}, on average {demand.input_tokens:,} tokens in and {demand.output_tokens:,} out",
    )


def _document(
    options: PlanServe, plan: "ServePlan", compared: "dict[str, list[Compared]]"
) -> dict[str, Any]:
    from cairn.plan import measured

    def option(found: Any) -> dict[str, Any]:
        return msgspec.to_builtins(found) | {
            "memory_bytes": found.room.table(),
            "why_not": found.why,
        }

    return {
        "model": options.model,
        "rate": plan.demand.rate,
        "device": plan.device,
        "best": option(plan.best) if plan.best is not None else None,
        "options": [option(one) for one in plan.options],
        "curve": plan.curve,
        "compared": measured.document(compared),
    }


def _print(
    options: PlanServe, plan: "ServePlan", notes: list[str], compared: "dict[str, list[Compared]]"
) -> None:
    from cairn.cli.columns import lines
    from cairn.core.units import format_bytes
    from cairn.plan.measured import median_error
    from cairn.plan.page import SERVE_HEADINGS, compared_rows, serve_cells

    print(in_terminal(f"{options.model} on {plan.device.name}: {notes[0]}"))
    print("\n".join(map(in_terminal, notes[1:])) + "\n")
    print("\n".join(lines(SERVE_HEADINGS, [serve_cells(option) for option in plan.options])))
    if plan.best is not None:
        parts = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in plan.best.room.table().items()
        )
        cache = f"{plan.best.room.cache_tokens:,} tokens of cache"
        print("\n" + in_terminal(f"memory of a GPU: {parts}; {cache}") + "\n")
        rows = [
            [f"{load.rate:.1f}/s", f"{load.output_tokens_per_s:,.0f}", f"{1e3 * load.ttft_p50:,.0f}",
             f"{1e3 * load.ttft_p99:,.0f}", f"{1e3 * load.tpot_p50:.1f}", f"{1e3 * load.tpot_p99:.1f}",
             str(load.running)]
            for load in plan.curve
        ]  # fmt: skip
        headings = [
            "one replica at",
            "tokens/s",
            "TTFT p50 ms",
            "p99",
            "TPOT p50 ms",
            "p99",
            "at once",
        ]
        print("\n".join(lines(headings, rows)))
    else:
        print("\nnothing holds: take more GPUs, a smaller rate or a looser SLO")
    for name, found in compared.items():
        error = median_error(found)
        if error is not None:
            print(f"\n{name}: median error {error:.1%}")
            print(
                "\n".join(lines(["case", "measured", "predicted", "error"], compared_rows(found)))
            )
