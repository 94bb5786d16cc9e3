"""`cairn simulate fleet`: a trace of requests through a fleet of servers, under each routing policy."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from cairn.core.config import load
from cairn.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from cairn.fleet.simulate import Outcome, Slo
    from cairn.fleet.simulate_prompts import Prompt
    from cairn.fleet.simulate_replica import StepSeconds
    from cairn.serve.engine.request import Limits

MOST_REQUESTS, MOST_SERVERS = 1_000_000, 1024
LONGEST_START_S = 86_400.0
RECORDED = "recorded"
LONGEST_S = 7 * 86_400.0  # that a scaled fleet is simulated, second by second


class SimulateFleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replay a trace through routing policies: time to the first token, goodput, cache hits.

    Policies: seconds, lmetric, dynamo, llmd, cache_aware, two_choices, round_robin. Each server has the engine's own
    scheduler and prefix cache; the router's index and policies are the ones that run. Without --trace, conversations
    are made up.
    """

    trace: Path | None = None
    """a trace of Mooncake (JSONL) or Azure (CSV)"""
    requests: int = 400
    """so many of the trace, or so many made-up ones"""
    skip: int = 0
    """so many of the trace are left out before them"""
    policy: str = "all"
    """names with commas, or all; with --scale always `seconds`"""
    servers: int = 8
    """in the fleet; with --scale it says how many"""
    load: str = "0.8"
    """shares of what the servers could compute if nothing were cached, with commas: 0.2,0.8,1.1; or recorded, the
    trace's own times"""
    model: str = "qwen3-8b"
    """that each server has: a shape, a packaged model, a folder with a config.json, a GGUF file or owner/name"""
    device: str = "h200"
    """that each server runs on"""
    slo: str = "ttft=2s,tpot=50ms"
    """what a good request holds"""
    scale: str = ""
    """servers that come and go with the load, LEAST-MOST such as 0-8, beside MOST that always run; by `seconds`"""
    start_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_START_S)] = 20.0
    """seconds until a server that is started answers, with --scale"""
    json: bool = False
    """print one JSON document"""


class _Fleet(NamedTuple):
    """Simulation input: requests, servers and latency limits."""

    prompts: "list[Prompt]"
    limits: "Limits"
    step_seconds: "StepSeconds"
    slo: "Slo"


def run(args: list[str]) -> int:
    options = load(
        SimulateFleet, args=args, env_prefix="CAIRN_SIMULATE_FLEET_", prog="cairn simulate fleet"
    ).value
    _check(options)
    loads, names = _loads(options.load), _policies(options.policy)
    fleet = _fleet(options)
    if options.scale:
        return _scaled(options, fleet, loads)
    from cairn.fleet.simulate import run_policy

    found: list[Outcome] = []
    for share in _resolved(loads, fleet, options.servers):
        for name in names:
            one = run_policy(
                name,
                fleet.prompts,
                share,
                options.servers,
                fleet.limits,
                fleet.step_seconds,
                fleet.slo,
            )
            found.append(one)
            print(f"load {share:.4g}: {name}", file=sys.stderr)
    if options.json:
        _print_json(options, servers=options.servers, outcomes=found)
        return 0
    from cairn.cli.columns import lines

    headings = ("policy", "load", "TTFT p50", "p99", "TPOT p99", "good", "good/s", "cached", "busiest")  # fmt: skip
    print("\n".join(lines(headings, [_row(one) for one in found])))
    return 0


def _check(options: SimulateFleet) -> None:
    for name, most in (("requests", MOST_REQUESTS), ("servers", MOST_SERVERS)):
        if not 1 <= getattr(options, name) <= most:
            raise UsageError(f"--{name} is {getattr(options, name)}", hint=f"1 to {most:,}")
    if options.skip < 0 or (options.skip and options.trace is None):
        hint = "0 or more; only requests of a --trace can be skipped"
        raise UsageError(f"--skip is {options.skip}", hint=hint)
    if options.scale and options.policy not in ("all", "seconds"):
        hint = "leave it out: the servers of a scaled fleet are chosen by `seconds`"
        raise UsageError(f"--scale is given with --policy {options.policy}", hint=hint)


def _fleet(options: SimulateFleet) -> _Fleet:
    from cairn.plan.device import device
    from cairn.plan.model_shape import model_shape
    from cairn.plan.serve_cost import Served, step_seconds
    from cairn.plan.serve_load import STEP_MS, limits, room
    from cairn.plan.slo import parse_slo
    from cairn.plan.weight_forms import weight_form

    shape, slo = model_shape(options.model), parse_slo(options.slo)
    form = weight_form("", shape.stored)
    served = Served(
        spec=shape.spec,
        device=device(options.device),
        weight_bytes=form.bytes,
        eight_bit=form.eight_bit,
    )
    limit = limits(served, room(served), served.spec.context, STEP_MS)
    return _Fleet(_prompts(options, limit), limit, step_seconds(served), slo)


def _prompts(options: SimulateFleet, limit: "Limits") -> "list[Prompt]":
    """Prompts of the trace, or synthetic ones that fit the model; prints how many were dropped."""
    from cairn.bench.arrival_traces import BLOCK_TOKENS, read_trace
    from cairn.fleet.simulate_prompts import (
        conversation_blocks,
        conversations,
        fitting,
        from_zero,
        prompts_of,
    )

    block = BLOCK_TOKENS
    if options.trace is None:
        block = conversation_blocks(limit.context, limit.page_size)
        trace = conversations(options.requests, block_tokens=block)
    else:
        trace = read_trace(options.trace, options.skip + options.requests)[options.skip :]
        if not trace:
            raise UsageError(
                f"{options.trace} has no request after --skip {options.skip}", hint="skip fewer"
            )
        trace = from_zero(trace)
    kept = fitting(trace, limit.context)
    if not kept:
        raise UsageError(
            f"no request of the trace fits into {limit.context:,} tokens, the context of {options.model}",
            hint="use another --model",
        )
    if out := len(trace) - len(kept):
        said = f"note: {out:,} of {len(trace):,} requests are left out: they are longer than the {limit.context:,} "
        print(f"{said}tokens of {options.model}", file=sys.stderr)
    return prompts_of(kept, limit.page_size, block)


def _scaled(options: SimulateFleet, fleet: _Fleet, loads: list[float | None]) -> int:
    from cairn.cli.columns import lines
    from cairn.fleet.scaling_policy import Rules
    from cairn.fleet.simulate_scale import run_scaled

    least, most = _range(options.scale)
    rows, found = [], []
    for share in _resolved(loads, fleet, most):
        _check_span(options, fleet, most, share)
        for low in dict.fromkeys((most, least)):
            rules = Rules(least=low, most=most, ttft_s=fleet.slo.ttft_s, start_s=options.start_s)
            one = run_scaled(
                fleet.prompts, share, rules, fleet.limits, fleet.step_seconds, fleet.slo
            )
            found.append({"least": low, "most": most, "scaled": one})
            shown = (
                f"{one.outcome.good_share:.1%}",
                f"{one.server_hours:.3f}",
                f"{one.good_per_server_hour:.0f}",
                str(one.most_servers),
                str(one.changes),
            )
            rows.append([f"{low} to {most}", f"{share:.4g}", *shown])
    if options.json:
        _print_json(options, start_s=options.start_s, scaled=found)
        return 0
    headings = ("servers", "load", "good", "server-hours", "good per hour", "most", "changes")
    print("\n".join(lines(headings, rows)))
    return 0


def _check_span(options: SimulateFleet, fleet: _Fleet, most: int, share: float) -> None:
    """Neither for ever, second by second, nor over before a server is up."""
    from cairn.fleet.simulate import span_s
    from cairn.fleet.simulate_replica import speed_of

    span = span_s(fleet.prompts, speed_of(fleet.step_seconds), most, share)
    if span > LONGEST_S:
        said = f"at load {share:g} the {len(fleet.prompts):,} requests come within {span / 86_400:.0f} days"
        raise UsageError(said, hint=f"a larger --load: at most {LONGEST_S / 86_400:.0f} days")
    if span < options.start_s:  # those who come first wait longer than anybody comes
        said = f"note: at load {share:.4g} all {len(fleet.prompts):,} requests come within {span:.1f} s, before a "
        said += f"server that is started answers ({options.start_s:g} s); use more --requests or a smaller --load"
        print(said, file=sys.stderr)


def _print_json(options: SimulateFleet, **more: object) -> None:
    asked = {
        "trace": str(options.trace or "made up"),
        "model": options.model,
        "device": options.device,
        "slo": options.slo,
    }
    print(msgspec.json.encode({**asked, **more}).decode())


def _row(one: "Outcome") -> list[str]:
    return [
        one.policy,
        f"{one.load:.4g}",
        _time(one.ttft_p50_s),
        _time(one.ttft_p99_s),
        f"{one.tpot_p99_s * 1e3:.1f} ms",
        f"{one.good_share:.1%}",
        f"{one.goodput:.2f}",
        f"{one.hit_share:.1%}",
        f"{one.busiest:.2f}",
    ]


def _time(seconds: float) -> str:
    """Format a time in at most eight characters, so that the table fits into 80 columns."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _policies(text: str) -> list[str]:
    """Parse policy names without duplicates."""
    from cairn.fleet.routing_policy import POLICIES

    if text == "all":
        return list(POLICIES)
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in POLICIES:
            there_are = f"all, or names with commas: {', '.join(POLICIES)}"
            hint = did_you_mean(name, POLICIES, otherwise=there_are)
            raise UsageError(f"--policy has '{name}'", hint=hint)
    return names


def _range(text: str) -> tuple[int, int]:
    """The fewest and the most servers of a scaled fleet."""
    found = re.fullmatch(r"(\d{1,4})-(\d{1,4})", text)
    least, most = (int(found[1]), int(found[2])) if found is not None else (1, 0)
    if not 0 <= least <= most or not 1 <= most <= MOST_SERVERS:
        hint = f"LEAST-MOST, such as 0-8, and no more than {MOST_SERVERS:,}"
        raise UsageError(f"--scale is {text!r}", hint=hint)
    return least, most


def _loads(text: str) -> list[float | None]:
    """Parse loads; None is the recorded load of the trace."""
    try:
        found = [None if part.strip() == RECORDED else float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(one is None or 0 < one <= 100 for one in found):
        hint = f"shares with commas, such as 0.2,0.8,1.1, or {RECORDED}"
        raise UsageError(f"--load is {text!r}", hint=hint)
    return found


def _resolved(loads: list[float | None], fleet: _Fleet, servers: int) -> list[float]:
    from cairn.fleet.simulate import recorded_load
    from cairn.fleet.simulate_replica import speed_of

    recorded = recorded_load(fleet.prompts, speed_of(fleet.step_seconds), servers)
    return [recorded if one is None else one for one in loads]
