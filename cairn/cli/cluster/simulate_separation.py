"""`cairn simulate separation`: a grid of lengths, cache hits and rates through servers with and without roles."""

import sys
from typing import TYPE_CHECKING

import msgspec

from cairn.core.config import load
from cairn.core.errors import UsageError

if TYPE_CHECKING:
    from cairn.fleet.simulate_separation import Outcome


class SimulateSeparation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Servers that do both, servers of their own for prefill and decode, and prefill elsewhere only where it pays.

    The same number of servers and the same requests for each. The last column compares the third with the better of the
    others, by requests per second that hold the SLO.
    """

    lengths: str = "512:256,2048:256,8192:128"
    """tokens of prompts and answers, INPUT:OUTPUT with commas"""
    hits: str = "0,0.5,0.9"
    """shares of prompts that others have had before, with commas"""
    load: str = "0.3,0.6,0.9"
    """shares of what the servers could compute if nothing were cached, with commas"""
    requests: int = 150
    """of each point"""
    prefill: int = 1
    """prefill servers"""
    decode: int = 1
    """decode servers"""
    link: float = 50.0
    """GB/s into a decode server"""
    model: str = "qwen3-8b"
    """shape of the model that each server has"""
    device: str = "h200"
    """that each server runs on"""
    slo: str = "ttft=1s,tpot=30ms"
    """what a good request holds"""
    json: bool = False
    """print one JSON document"""


def run(args: list[str]) -> int:
    options = load(
        SimulateSeparation,
        args=args,
        env_prefix="CAIRN_SIMULATE_SEPARATION_",
        prog="cairn simulate separation",
    ).value
    for name, most in (("requests", 100_000), ("prefill", 1024), ("decode", 1024)):
        if not 1 <= getattr(options, name) <= most:
            raise UsageError(f"--{name} is {getattr(options, name)}", hint=f"1 to {most:,}")
    if not options.link > 0:
        raise UsageError(f"--link is {options.link:g}", hint="GB/s, above 0")
    grid = [_outcomes(options, *place) for place in _grid(options)]
    if options.json:
        print(msgspec.json.encode({"options": options, "points": grid}).decode())
        return 0
    from cairn.cli.columns import lines
    from cairn.fleet.simulate_separation import ARRANGEMENTS

    headings = ("in:out", "hits", "load", *ARRANGEMENTS, "elsewhere", "to the better")
    print("\n".join(lines(headings, [_row(one) for one in grid])))
    return 0


def _grid(options: SimulateSeparation) -> list[tuple[int, int, float, float]]:
    try:
        lengths = [tuple(map(int, pair.split(":"))) for pair in options.lengths.split(",")]
        hits, loads = (
            [float(one) for one in text.split(",")] for text in (options.hits, options.load)
        )
        found = [(inp, out, hit, share) for inp, out in lengths for hit in hits for share in loads]
    except ValueError:
        found = []
    right = all(
        inp > 0 and out > 1 and 0 <= hit < 1 and 0 < share <= 10 for inp, out, hit, share in found
    )
    if not found or not right:
        raise UsageError(
            f"--lengths {options.lengths} --hits {options.hits} --load {options.load} are no grid",
            hint="such as --lengths 512:256,8192:128 --hits 0,0.9 --load 0.3,0.9",
        )
    return found


def _outcomes(
    options: SimulateSeparation, inp: int, out: int, hits: float, share: float
) -> "list[Outcome]":
    from cairn.fleet.simulate_separation import ARRANGEMENTS, Machines, Point, simulate_separation
    from cairn.models.cache import cache_bytes_per_token
    from cairn.models.presets import preset
    from cairn.plan.device import device
    from cairn.plan.serve_cost import Served, step_seconds
    from cairn.plan.serve_load import STEP_MS, limits, room
    from cairn.plan.slo import parse_slo

    served = Served(spec=preset(options.model), device=device(options.device))
    limit = limits(served, room(served), served.spec.context, STEP_MS)
    if inp + out > limit.context:
        raise UsageError(f"--lengths has {inp}:{out}", hint=f"at most {limit.context} tokens")
    machines = Machines(
        limits=limit,
        step_seconds=step_seconds(served),
        token_bytes=cache_bytes_per_token(served.spec, served.cache_bytes),
        prefill=options.prefill,
        decode=options.decode,
        link_bytes_per_s=options.link * 1e9,
    )
    point, slo = (
        Point(input_tokens=inp, output_tokens=out, hits=hits, load=share),
        parse_slo(options.slo),
    )
    print(f"{inp}:{out}, hits {hits:g}, load {share:g}", file=sys.stderr)
    return [
        simulate_separation(one, point, options.requests, machines, slo) for one in ARRANGEMENTS
    ]


def _row(outcomes: "list[Outcome]") -> list[str]:
    aggregated, separated, conditional = outcomes
    point, better = conditional.point, max(aggregated.goodput, separated.goodput)
    ratio = f"{conditional.goodput / better - 1:+.1%}" if better else "none is good"
    return [
        f"{point.input_tokens}:{point.output_tokens}",
        f"{point.hits:g}",
        f"{point.load:g}",
        *(f"{one.goodput:.2f}/s" for one in outcomes),
        f"{conditional.remote_share:.0%}",
        ratio,
    ]
