"""`cairn comm simulate`: a collective on a cluster that is not here, up to a hundred thousand GPUs.

Prints what `cairn.comm.simulate` finds out, and decides nothing.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from cairn.core.config import load
from cairn.core.errors import DataError, UsageError
from cairn.core.units import format_bytes, format_duration, parse_bytes
from cairn.report.progress import Advance, progress

if TYPE_CHECKING:
    from cairn.comm.simulate.collective import CollectiveResult, RailOutcome
    from cairn.comm.simulate.deadlines import TransferJob
    from cairn.comm.simulate.topology import FabricTopology

EXAMPLE = "example"
FAULTS_SHOWN = 8


class Simulate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Simulate a collective on a cluster, chunk by chunk: NVLink domains, rails, leaves, spines, cores.

    Links are shared max-min by the flows that a hash puts on them. Faults are drawn with --seed. --incast, --circle
    and --jobs simulate other things: queues with pause frames, their deadlock, and jobs with deadlines.
    """

    gpus: int = 98304
    """how many"""
    op: str = "all_reduce"
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce"""
    size: str = "1GiB"
    """of the whole vector, as nccl-tests count it"""
    topology: str = "rail-3tier"
    """nvlink, rail-1tier, rail-2tier, rail-3tier, fat-tree"""
    algorithm: str = "auto"
    """tree, ring, pat (between nodes); auto: the fastest of one rail"""
    domain: int = 8
    """GPUs of an NVLink domain"""
    nvlink: float = 360.0
    """GB/s of each GPU inside its domain"""
    nic: float = 50.0
    """GB/s of the network for each GPU"""
    radix: int = 64
    """ports of a switch"""
    oversubscription: float = 1.0
    """of the leaves: bandwidth below / above"""
    balance: Literal["ecmp", "spread"] = "ecmp"
    """a hash chooses among equal paths, or packets are spread over all"""
    paths: int = 4
    """flows of a connection, each hashed for itself"""
    slow_nics: int = 0
    """NICs at --slow-factor of their rate"""
    slow_factor: float = 0.25
    """see --slow-nics"""
    dead_nics: int = 0
    """NICs that are down; a neighbour carries their bytes"""
    dead_links: float = 0.0
    """share of the links between leaves and spines that are down"""
    stragglers: int = 0
    """nodes that come --late"""
    late: str = "0"
    """how much later stragglers come, such as 5ms"""
    seed: int = 0
    """of the faults"""
    chunks: int = 128
    """pieces that follow each other through the stages"""
    rails: int = 2
    """how many of the rails that only hash differently"""
    incast: int = 0
    """instead: so many senders at one receiver, with pause frames, and a bystander"""
    circle: int = 0
    """instead: so many switches in a ring, every flow over three of them, with pause frames"""
    jobs: str | None = None
    """instead: jobs with deadlines from a TOML file (or `example`), fair sharing against deadlines"""
    validate: bool = False
    """instead: published figures beside predicted ones"""
    html: Path | None = None
    """write one self-contained page with plots to this file"""
    json: bool = False
    """print one JSON document"""


class Jobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[[job]] name, links, bytes, compute_us, start_us, steps; links = GB/s of each."""

    links: list[float]
    job: list[dict[str, object]]


def run_simulate(args: list[str]) -> int:
    options = load(Simulate, args=args, env_prefix="CAIRN_COMM_SIMULATE_").value
    asked = [options.incast, options.circle, options.jobs is not None, options.validate]
    if sum(map(bool, asked)) > 1:
        raise UsageError(
            "--incast, --circle, --jobs and --validate are different questions", hint="ask one"
        )
    if options.circle:
        return _circle(options)
    if options.incast:
        return _incast(options)
    if options.jobs is not None:
        return _jobs(options)
    if options.validate:
        return _validate(options)
    return _collective(options)


def _collective(options: Simulate) -> int:
    from cairn.comm.simulate.collective import simulate
    from cairn.comm.simulate.faults import Faults
    from cairn.comm.simulate.topology import topology
    from cairn.core.units import parse_duration

    top = topology(
        options.topology, options.gpus, domain=options.domain, nvlink_gb_per_s=options.nvlink,
        nic_gb_per_s=options.nic, radix=options.radix, oversubscription=options.oversubscription,
        balance=options.balance, paths=options.paths,
    )  # fmt: skip
    faults = Faults(
        slow_nics=options.slow_nics,
        slow_factor=options.slow_factor,
        dead_nics=options.dead_nics,
        dead_links=options.dead_links,
        stragglers=options.stragglers,
        late_us=1e6 * parse_duration(options.late),
        seed=options.seed,
    )
    size, began = parse_bytes(options.size), time.perf_counter()
    with progress(_ticks(options), "simulating") as advance:
        outcome = simulate(
            top, options.op, size, algorithm=options.algorithm, faults=faults,
            chunks=options.chunks, rails=options.rails, tick=_rails_only(advance),
        )  # fmt: skip
    seconds, healthy = time.perf_counter() - began, None
    if faults != Faults(seed=options.seed):
        name = outcome.result.algorithm if top.nodes > 1 else "auto"
        healthy = simulate(
            top, options.op, size, algorithm=name, chunks=options.chunks, rails=options.rails
        ).result
    if options.html is not None:
        _write_page(options, top, outcome, healthy)
    if options.json:
        document = {
            "topology": top,
            "nodes": top.nodes,
            "result": outcome.result,
            "healthy": healthy,
            "seconds": round(seconds, 3),
        }
        _print_json(document)
    else:
        _print_result(top, outcome.result, healthy, seconds)
    return 0


def _rails_only(advance: Advance) -> Advance:
    def tick(what: str) -> None:
        if " on rail " in what:
            advance(what)

    return tick


def _ticks(options: Simulate) -> int:
    """Rails that will be simulated: the trials of `auto`, then the rails asked for."""
    trials = 3 if options.algorithm == "auto" else 0
    faulty = min(options.domain, options.slow_nics + 2 * options.dead_nics)
    return trials + max(options.rails, faulty)


def _write_page(
    options: Simulate,
    top: "FabricTopology",
    outcome: "RailOutcome",
    healthy: "CollectiveResult | None",
) -> None:
    from cairn.comm.simulate.collective import simulate
    from cairn.comm.simulate.page import render

    largest = outcome.result.bytes
    sizes = sorted({max(largest >> shift, top.gpus) for shift in (10, 8, 6, 4, 2)} | {largest})
    name = outcome.result.algorithm if top.nodes > 1 else "auto"
    sweep = []
    with progress(len(sizes), "other sizes") as advance:
        for size in sizes:
            one = simulate(top, options.op, size, algorithm=name, chunks=options.chunks, rails=1)
            sweep.append(one.result)
            advance(format_bytes(size))
    assert options.html is not None
    try:
        options.html.write_text(render(top, outcome, sweep, healthy), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {options.html}: {error.strerror}", hint="another --html"
        ) from None


def _print_result(
    top: "FabricTopology",
    result: "CollectiveResult",
    healthy: "CollectiveResult | None",
    seconds: float,
) -> None:
    print(
        f"{result.collective} of {format_bytes(result.bytes)} on {top.gpus:,} GPUs "
        f"({top.name}, {top.nodes:,} nodes of {top.domain})"
    )
    print(f"  {'time':<22} {format_duration(result.us / 1e6)}")
    print(f"  {'bus bandwidth':<22} {result.busbw_gb_per_s:.1f} GB/s")
    print(f"  {'schedule':<22} {result.algorithm}, {result.steps:,} waits for the network")
    print(f"  {'chunks':<22} {result.chunks} of {format_bytes(result.chunk_bytes)}")
    print(f"  {'network alone':<22} {format_duration(result.far_us / 1e6)}")
    print(f"  {'NVLink alone':<22} {format_duration(result.near_us / 1e6)}")
    print(f"  {'no waits, no sharing':<22} {format_duration(result.ideal_us / 1e6)}")
    if result.rails:
        crowd = f"{result.largest_sharing} at most, {result.flows:,} routed"
        print(f"  {'flows on one link':<22} {crowd}")
        print(f"  {'rails simulated':<22} {result.rails} of {top.planes}; the slowest counts")
    for name in result.faults[:FAULTS_SHOWN]:
        print(f"  {'fault':<22} {name}")
    if len(result.faults) > FAULTS_SHOWN:
        print(f"  {'':<22} and {len(result.faults) - FAULTS_SHOWN:,} more (--json has all)")
    if healthy is not None:
        print(
            f"  {'healthy':<22} {format_duration(healthy.us / 1e6)}: {result.us / healthy.us:.2f} x"
        )
    print(f"simulated in {format_duration(seconds)}")


def _incast(options: Simulate) -> int:
    import numpy as np

    from cairn.comm.simulate.lossless import incast

    size = parse_bytes(options.size)
    story = incast(options.incast, size, options.nic)
    alone = size / (1e3 * options.nic)
    document = {
        "senders": options.incast,
        "bytes": size,
        "all_us": float(np.max(story.finish_us)),
        "bystander_us": float(story.finish_us[-1]),
        "bystander_alone_us": alone,
        "uplink_paused_us": float(story.paused_us[options.incast + 1]),
        "sender_paused_us": float(story.paused_us[0]),
    }
    if options.json:
        _print_json(document)
        return 0
    print(f"{options.incast} senders of {format_bytes(size)} at one receiver, with pause frames")
    print(f"  {'all done':<26} {format_duration(document['all_us'] / 1e6)}")
    print(f"  {'a NIC was paused for':<26} {format_duration(document['sender_paused_us'] / 1e6)}")
    print(
        f"  {'a bystander took':<26} {format_duration(document['bystander_us'] / 1e6)}, "
        f"alone {format_duration(alone / 1e6)}"
    )
    return 0


def _circle(options: Simulate) -> int:
    from cairn.comm.simulate.lossless import can_deadlock, circle

    paths, story = circle(options.circle, parse_bytes(options.size), options.nic)
    document = {
        "switches": options.circle,
        "can_deadlock": list(can_deadlock(paths)),
        "deadlock": list(story.deadlock),
        "us": story.us,
    }
    if options.json:
        _print_json(document)
    elif story.deadlock:
        links = " -> ".join(map(str, story.deadlock))
        print(
            f"deadlock after {format_duration(story.us / 1e6)}: links {links} wait for each other"
        )
    else:
        print(f"done after {format_duration(story.us / 1e6)}")
    return 0


def _jobs(options: Simulate) -> int:
    import numpy as np

    from cairn.comm.simulate.deadlines import POLICIES, run_jobs

    jobs, rates = _read_jobs(options.jobs or EXAMPLE)
    found = {policy: run_jobs(jobs, np.array(rates), policy) for policy in POLICIES}
    if options.json:
        _print_json(found)
        return 0
    print(f"{'job':<16} {'alone':>12} {'fair':>12} {'late':>6} {'deadline':>12} {'late':>6}")
    for fair, timely in zip(found["fair"], found["deadline"], strict=True):
        times = [
            format_duration(us / 1e6)
            for us in (fair.ideal_step_us, fair.mean_step_us, timely.mean_step_us)
        ]
        print(
            f"{fair.name:<16} {times[0]:>12} {times[1]:>12} {fair.missed:>3}/{fair.steps:<2} "
            f"{times[2]:>12} {timely.missed:>3}/{timely.steps:<2}"
        )
    return 0


def _read_jobs(where: str) -> tuple[list["TransferJob"], list[float]]:
    from cairn.comm.simulate.deadlines import TransferJob

    if where == EXAMPLE:
        return [
            TransferJob(name="tight", links=(0,), bytes=30e6, compute_us=1000.0, steps=40),
            TransferJob(name="large", links=(0,), bytes=60e6, compute_us=8000.0, steps=5),
            TransferJob(name="small", links=(0,), bytes=10e6, compute_us=4000.0, steps=10),
        ], [50.0]
    try:
        text = Path(where).read_bytes()
        read = msgspec.toml.decode(text, type=Jobs)
        return [msgspec.convert(job, TransferJob, strict=False) for job in read.job], read.links
    except OSError as error:
        raise DataError(
            f"cannot read {where}: {error.strerror}", hint="give a TOML file of jobs"
        ) from None
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        hint = "links = [50.0] and [[job]] with name, links, bytes, compute_us"
        raise DataError(f"{where}: {error}", hint=hint) from None


def _validate(options: Simulate) -> int:
    from cairn.comm.validate_fabrics import markdown, report

    with progress(1, "predicting what was published") as advance:
        found = report()
        advance("done")
    if options.json:
        _print_json(found)
    else:
        print(markdown(found), end="")
    return 0 if found.ok else 1


def _print_json(document: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(document)).decode())
