"""`cairn plan serve`: how many GPUs serve a model at this rate, and how fast. Prints; `cairn.plan` decides."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import tyro

from cairn.cli.progress import progress
from cairn.core.config import load
from cairn.core.errors import UsageError

if TYPE_CHECKING:
    from cairn.plan.published import Compared
    from cairn.plan.serve_plan import ServePlan


class PlanServe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Simulate the real scheduler at a rate: does it fit, latency under load, GPUs, cost and energy."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """a shape, such as qwen3-8b or llama-3.1-70b"""
    gpu: str = "h200"
    """h200, h100, h100-500w, a100 or b200"""
    rate: float = 10.0
    """requests a second, Poisson"""
    gpus: int = 64
    """at most so many"""
    input_tokens: int = 1024
    """of a prompt, a quarter more or less"""
    output_tokens: int = 256
    """of an answer, a quarter more or less"""
    slo_ttft_ms: float = 500.0
    """p99 until the first token"""
    slo_tpot_ms: float = 50.0
    """p99 between tokens"""
    fp8: bool = False
    """weights in 8 bits"""
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
    from cairn.models.presets import preset
    from cairn.plan import measured, page
    from cairn.plan.device import device
    from cairn.plan.serve_cost import Served
    from cairn.plan.serve_plan import Asked, plan, sizes

    spec = preset(options.model)
    _check(options, spec.context)
    gpu = device(
        options.gpu, **({"usd_per_hour": options.price} if options.price is not None else {})
    )
    asked = Asked(
        rate=options.rate, input_tokens=options.input_tokens, output_tokens=options.output_tokens,
        slo_ttft=options.slo_ttft_ms / 1e3, slo_tpot=options.slo_tpot_ms / 1e3,
    )  # fmt: skip
    served = Served(spec=spec, device=gpu, weight_bytes=1.0 if options.fp8 else 2.0)
    with progress(len(sizes(served, options.gpus)), "simulating") as advance:
        found = plan(served, asked, options.gpus, advance)
    rows = (
        measured.serving(only=options.model) if options.measured and options.gpu == "h200" else []
    )
    compared = {"Measured on one H200": rows}
    notes = [
        f"{options.rate:g} requests/s of {options.input_tokens} tokens in and {options.output_tokens} out, "
        f"p99 TTFT {options.slo_ttft_ms:g} ms and TPOT {options.slo_tpot_ms:g} ms",
        gpu.words(),
    ]
    if options.html is not None:
        title = f"{options.model} served by {gpu.name}"
        options.html.write_text(page.serve_page(title, notes, found, compared), encoding="utf-8")
        print(f"wrote {options.html}", file=sys.stderr)
    if options.json:
        print(
            msgspec.json.format(msgspec.json.encode(_document(options, found, compared))).decode()
        )
    else:
        _print(options, found, notes, compared)
    return 0 if found.best is not None else 1


def _check(options: PlanServe, context: int) -> None:
    for name in ("rate", "gpus", "input_tokens", "output_tokens", "slo_ttft_ms", "slo_tpot_ms"):
        if not 0 < getattr(options, name) < float("inf"):
            raise UsageError(
                f"--{name.replace('_', '-')} is {getattr(options, name)}", hint="above 0"
            )
    longest = int(1.25 * options.input_tokens) + int(1.25 * options.output_tokens)
    if longest > context:
        raise UsageError(
            f"requests of up to {longest} tokens are longer than the {context} of {options.model}",
            hint="fewer tokens in or out; lengths vary by a quarter",
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
        "model": options.model, "rate": options.rate, "device": plan.device,
        "best": option(plan.best) if plan.best is not None else None,
        "options": [option(one) for one in plan.options], "curve": plan.curve,
        "compared": measured.document(compared),
    }  # fmt: skip


def _print(
    options: PlanServe, plan: "ServePlan", notes: list[str], compared: "dict[str, list[Compared]]"
) -> None:
    from cairn.cli.columns import lines
    from cairn.core.units import format_bytes
    from cairn.plan.measured import median_error
    from cairn.plan.page import SERVE_HEADINGS, compared_rows, serve_cells

    print(f"{options.model} on {plan.device.name}: {notes[0]}")
    print(notes[1] + "\n")
    print("\n".join(lines(SERVE_HEADINGS, [serve_cells(option) for option in plan.options])))
    if plan.best is not None:
        parts = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in plan.best.room.table().items()
        )
        print(f"\nmemory of a GPU: {parts}; {plan.best.room.cache_tokens:,} tokens of cache\n")
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
