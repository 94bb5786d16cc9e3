"""`cairn simulate cluster`: replay a trace of jobs through scheduling policies. Prints; the simulator decides."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cairn.core.config import load
from cairn.core.errors import DataError, UsageError, did_you_mean
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.cluster.simulate.history import ReplayHistory
    from cairn.cluster.simulate.jobs import SimulatedCluster
    from cairn.cluster.simulate.packing import PackingRun
    from cairn.cluster.simulate.summary import ReplaySummary
    from cairn.cluster.simulate.traces import JobTrace

SHIFTS = "fifo,sjf,easy"


class SimulateCluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replay a trace through policies and compare waits, use of GPUs, fairness and losses.

    Policies: fifo, sjf, easy, fair, drf, priority, topology, fgd, elastic, deadline. With --node-list the trace is
    Alibaba's openb, pods are packed until the cluster is full, and the policies are random, dotprod, clustering,
    packing, bestfit and fgd.
    """

    trace: Path | None = None
    """a CSV file: submit,duration,gpus[,user,...], philly_sia.csv, or the pods of openb"""
    synthetic: int | None = None
    """make this many jobs up instead"""
    policy: str = SHIFTS
    """names with commas, or all"""
    nodes: int | None = None
    """of the cluster; by default so many that jobs keep 90% busy while they come, if none has to wait"""
    gpus: int = 8
    """of each node"""
    rack: int = 16
    """nodes that share a switch"""
    cpus: float = 0.0
    """of each node; 0 does not count them. They limit the cluster as a whole, and count for drf"""
    memory_gib: float = 0.0
    """of each node, likewise"""
    overestimate: float = 1.0
    """limits over durations, where the trace has none"""
    half_life: float = 168.0
    """hours after which past use counts half (fair)"""
    checkpoint: float = 30.0
    """minutes; a preempted job goes on from there"""
    spread_slowdown: float = 0.0
    """how much longer a gang takes over more racks than it needs, such as 0.1"""
    why: int | None = None
    """a job (its id, or its line of the trace from 0): say why it waited, moment by moment"""
    node_list: Path | None = None
    """the nodes of the openb trace: how full do its GPUs get?"""
    seeds: int = 10
    """orders of arrival to average over, with --node-list"""
    seed: int = 0
    """of --synthetic"""
    html: Path | None = None
    """write one self-contained page to this file"""
    json: bool = False
    """print one JSON document"""


def run(args: list[str]) -> int:
    options = load(SimulateCluster, args=args, env_prefix="CAIRN_SIMULATE_CLUSTER_").value
    _check(options)
    return _pack(options) if options.node_list is not None else _replay(options)


def _check(options: SimulateCluster) -> None:
    if (options.trace is None) == (options.synthetic is None):
        raise UsageError(
            "`cairn simulate cluster` takes --trace FILE or --synthetic N", hint="one of the two"
        )
    if options.synthetic is not None and not 1 <= options.synthetic <= 1_000_000:
        raise UsageError(f"--synthetic is {options.synthetic}", hint="1 to 1,000,000 jobs")
    for name in ("nodes", "gpus", "rack", "seeds"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= 1_000_000:
            raise UsageError(f"--{name} is {value}", hint="a number from 1 to 1,000,000")
    if options.seed < 0:
        raise UsageError(f"--seed is {options.seed}", hint="0 or more")
    if options.html is not None and (options.html.is_dir() or not options.html.parent.is_dir()):
        raise UsageError(
            f"cannot write a page to {options.html}", hint="give a file in a folder that exists"
        )
    for name in ("overestimate", "half_life"):
        if not 0 < getattr(options, name) < float("inf"):
            raise UsageError(
                f"--{name.replace('_', '-')} is {getattr(options, name)}", hint="above 0"
            )
    if options.overestimate < 1:
        raise UsageError(
            f"--overestimate is {options.overestimate}", hint="below 1 every job is ended early"
        )
    for name in ("checkpoint", "spread_slowdown", "cpus", "memory_gib"):
        if not 0 <= getattr(options, name) < float("inf"):
            raise UsageError(
                f"--{name.replace('_', '-')} is {getattr(options, name)}", hint="0 or more"
            )


def _chosen(text: str, known: list[str]) -> list[str]:
    if text == "all":
        return known
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(
                f"no policy '{name}'",
                hint=did_you_mean(name, known, f"there are: {', '.join(known)}"),
            )
    if not names:
        raise UsageError("--policy is empty", hint=f"there are: {', '.join(known)}")
    return list(dict.fromkeys(names))


def _replay(options: SimulateCluster) -> int:
    from cairn.cluster.simulate import page
    from cairn.cluster.simulate.policies import POLICIES

    names = _chosen(options.policy, list(POLICIES))
    trace, cluster, notes = _prepare(options)
    histories, summaries = _histories(options, names, trace, cluster)
    if options.html is not None:
        title = f"{trace.name} on {cluster.total:,} GPUs"
        options.html.write_text(
            page.compare_page(title, notes, histories, summaries), encoding="utf-8"
        )
        print(f"wrote {options.html}", file=sys.stderr)
    if options.json:
        _print_json(_comparison(options, trace, cluster, notes, histories, summaries))
        return 0
    _print(trace, cluster, notes, histories, summaries)
    _print_why(histories, options.why)
    took = ", ".join(f"{summary.policy} {summary.seconds:.1f} s" for summary in summaries)
    print(f"simulated in {took}")
    return 0


def _histories(
    options: SimulateCluster, names: list[str], trace: "JobTrace", cluster: "SimulatedCluster"
) -> "tuple[list[ReplayHistory], list[ReplaySummary]]":
    """The trace through each policy."""
    from cairn.cluster.simulate.policies import POLICIES
    from cairn.cluster.simulate.replay import HOUR, ReplaySettings, replay
    from cairn.cluster.simulate.summary import summarise

    settings = ReplaySettings(
        half_life=options.half_life * HOUR,
        checkpoint=options.checkpoint * 60,
        spread_slowdown=options.spread_slowdown,
    )
    histories: list[ReplayHistory] = []
    summaries: list[ReplaySummary] = []
    with progress(len(names) * (1 + len(trace.jobs) // 1000), "simulating") as advance:
        for name in names:
            began = time.process_time()
            history = replay(
                cluster,
                trace.jobs,
                POLICIES[name],
                settings,
                watch=options.why,
                progress=lambda done, name=name: advance(f"{name}: {done:,} jobs"),
            )
            histories.append(history)
            summaries.append(summarise(history, time.process_time() - began))
    return histories, summaries


def _comparison(
    options: SimulateCluster,
    trace: "JobTrace",
    cluster: "SimulatedCluster",
    notes: list[str],
    histories: "list[ReplayHistory]",
    summaries: "list[ReplaySummary]",
) -> dict[str, object]:
    from cairn.cluster.simulate.explain import fate, refusals

    document: dict[str, object] = {
        "trace": trace.name,
        "cluster": cluster,
        "notes": notes,
        "policies": summaries,
        "rejected": {history.policy: refusals(history) for history in histories},
    }
    if (job := options.why) is not None:
        document["why"] = {history.policy: history.reasons for history in histories}
        document["fate"] = {history.policy: fate(history, job) for history in histories}
    return document


def _prepare(options: SimulateCluster) -> "tuple[JobTrace, SimulatedCluster, list[str]]":
    from cairn.cluster.simulate.jobs import SimulatedCluster
    from cairn.cluster.simulate.traces import kept_busy, read_trace, synthetic

    if options.trace is not None:
        trace = read_trace(options.trace, options.overestimate)
    else:
        trace = synthetic(options.synthetic or 1, options.seed)
    if options.why is not None and all(job.id != options.why for job in trace.jobs):
        raise UsageError(
            f"no job {options.why} in the trace",
            hint=f"ids go from {min(job.id for job in trace.jobs)} to {max(job.id for job in trace.jobs)}",
        )
    if options.nodes is not None:
        cluster, notes = (
            SimulatedCluster(nodes=options.nodes, gpus=options.gpus, rack=options.rack),
            [],
        )
    else:
        cluster, why = kept_busy(trace.jobs, options.gpus, options.rack)
        notes = [why]
    cpus, memory = options.cpus * cluster.nodes, options.memory_gib * cluster.nodes
    return trace, msgspec.structs.replace(cluster, cpus=cpus, memory_gib=memory), notes


def _print(
    trace: "JobTrace",
    cluster: "SimulatedCluster",
    notes: list[str],
    histories: "list[ReplayHistory]",
    summaries: "list[ReplaySummary]",
) -> None:
    from cairn.cli.columns import lines
    from cairn.cluster.simulate.explain import refusals
    from cairn.cluster.simulate.page import HEADINGS, cells
    from cairn.core.prose import in_terminal

    jobs = "1 job" if len(trace.jobs) == 1 else f"{len(trace.jobs):,} jobs"
    print(f"{trace.name}: {jobs} on {cluster.words()}")
    for note in notes:
        print(in_terminal(note))
    print("\n" + "\n".join(lines(HEADINGS, [cells(summary) for summary in summaries])) + "\n")
    for history in histories:
        refused = refusals(history)
        for identity, why in refused[:1]:
            print(f"{history.policy} rejects job {identity}: {why}")
        if len(refused) > 1:
            print(f"{history.policy} rejects {len(refused) - 1:,} more; --json has all of them")


def _print_why(histories: "list[ReplayHistory]", identity: int | None) -> None:
    from cairn.cluster.simulate.explain import fate
    from cairn.core.units import format_duration

    if identity is None:
        return
    for history in histories:
        for at, why in history.reasons[:20]:
            print(f"{history.policy} after {format_duration(at)}: {why}")
        if len(history.reasons) > 20:
            print(f"{history.policy}: and {len(history.reasons) - 20} more; --json has all of them")
        print(f"{history.policy}: {fate(history, identity)}")


def _pack(options: SimulateCluster) -> int:
    from cairn.cluster.simulate import page
    from cairn.cluster.simulate.openb import read_nodes, read_pods
    from cairn.cluster.simulate.packing import POLICIES, pack

    if options.trace is None or options.node_list is None:
        raise UsageError("--node-list goes with --trace", hint="give the list of pods as --trace")
    chosen = "all" if options.policy == SHIFTS else options.policy
    names = _chosen(chosen, list(POLICIES))
    pods, nodes = read_pods(options.trace), read_nodes(options.node_list)
    if not pods.demand().sum():
        raise DataError(f"{options.trace} asks for no GPUs", hint="is it the list of pods?")
    runs: list[PackingRun] = []
    with progress(len(names) * options.seeds, "packing") as advance:
        for name in names:
            for seed in range(options.seeds):
                runs.append(pack(pods, nodes, name, seed))
                advance(f"{name}, order {seed}")
    note = (
        f"{len(pods):,} pods and copies of them on {len(nodes):,} nodes with {nodes.gpus.sum():,} GPUs, "
        f"{options.seeds} random orders; published: Weng and others, ATC 2023"
    )
    if options.html is not None:
        options.html.write_text(
            page.packing_page("How full do shared GPUs get?", [note], runs), encoding="utf-8"
        )
        print(f"wrote {options.html}", file=sys.stderr)
    if options.json:
        rows = {name: [run for run in runs if run.policy == name] for name in names}
        _print_json({"note": note, "policies": [_document(name, rows[name]) for name in names]})
        return 0
    print(note)
    for name in names:
        print(f"{name:<12}" + "".join(f"{cell:>12}" for cell in page.packing_cells(name, runs)))
    return 0


def _document(name: str, runs: "list[PackingRun]") -> dict[str, object]:
    from cairn.cluster.simulate.packing import PUBLISHED

    mean = 100 * sum(run.allocated for run in runs) / len(runs)
    return {
        "policy": name,
        "allocated_percent": round(mean, 3),
        "published_percent": PUBLISHED[name],
        "difference": round(mean - PUBLISHED[name], 3),
        "by_seed": [round(100 * run.allocated, 3) for run in runs],
        "turned_away": [run.turned_away for run in runs],
    }


def _print_json(document: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(document)).decode())
