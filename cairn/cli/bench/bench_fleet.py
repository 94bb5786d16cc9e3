"""`cairn bench fleet`: what the router costs in CPU time, beside other routers. Measures nothing itself."""

import os
import platform
import sys
from pathlib import Path

import msgspec

from cairn.core.config import load
from cairn.core.errors import UsageError, did_you_mean


class BenchFleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU time of a router per JSON request and per streamed event, ours and others', in turns.

    Two servers without a model stand behind each of them. A peer that is not installed is reported as absent. Linux.
    """

    peers: str = "haproxy,envoy,vllm-router"
    """names with commas: haproxy, envoy, vllm-router"""
    requests: int = 2500
    """JSON requests, 32 at a time"""
    streams: int = 64
    """streams of 64 events, all at once"""
    rounds: int = 1
    """of all routers, one after the other"""
    json: bool = False
    """print one JSON document"""
    out: Path | None = None
    """write the result with its origin to this file"""
    commit: str | None = None
    """the commit that runs, where there is no git"""


def run(args: list[str]) -> int:
    options = load(BenchFleet, args=args, env_prefix="CAIRN_BENCH_FLEET_").value
    for name in ("requests", "streams", "rounds"):
        if not 1 <= getattr(options, name) <= 1_000_000:
            raise UsageError(f"--{name} is {getattr(options, name)}", hint="1 to 1,000,000")
    from cairn.bench import record
    from cairn.cli.columns import lines
    from cairn.fleet.measure.drive import measure
    from cairn.fleet.measure.peers import PEERS

    names = ["cairn", *(name for name in options.peers.split(",") if name and name != "cairn")]
    for name in names:
        if name not in PEERS:
            hint = did_you_mean(name, PEERS, otherwise=f"there are: {', '.join(PEERS)}")
            raise UsageError(f"--peers has '{name}'", hint=hint)
    if options.out is not None:
        record.require_commit(options.commit)
    found, others = [], os.getloadavg()[0]  # before this run adds to it
    for turn in range(options.rounds):
        for name in names:
            found.append(measure(PEERS[name], options.requests, options.streams))
            print(f"round {turn + 1}: {name}", file=sys.stderr)
    if options.out is not None:
        machine = f"{platform.machine()}, {os.cpu_count()} CPUs"
        command = record.repeatable(["bench", "fleet"], args)
        made = msgspec.to_builtins(record.origin(command, machine, options.commit))
        record.write(made | {"load_average": round(others, 1), "rows": found}, options.out)
    if options.json:
        print(msgspec.json.encode({"rows": found}).decode())
        return 0
    rows = [
        [one.router, *(_text(getattr(one, field)) for field in FIELDS), one.note] for one in found
    ]
    print("\n".join(lines(("router", "us/request", "us/event", "requests/s", "MB", "note"), rows)))
    return 0


FIELDS = ("us_per_request", "us_per_frame", "requests_per_s", "rss_mb")


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
