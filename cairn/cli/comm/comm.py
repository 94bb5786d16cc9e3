"""`cairn comm`: prove collective schedules, and choose what NCCL should use.

Prints what `cairn.comm` finds out, and decides nothing.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn.cli.comm.comm_bench import run_bench
from cairn.cli.comm.comm_doctor import run_doctor
from cairn.cli.comm.comm_export import run_export
from cairn.cli.comm.comm_simulate import run_simulate
from cairn.cli.subverbs import Subverb, dispatch
from cairn.core.config import load
from cairn.core.errors import DataError, UsageError, did_you_mean
from cairn.core.units import format_bytes, format_duration
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.comm.nccl_tuner import TunerRule
    from cairn.comm.schedule.ops import Collective, CollectiveSchedule
    from cairn.comm.schedule.verify import Proof

ABOUT = "Collectives: prove a schedule, measure it, simulate it, and find out why it is slow."
PROVED = "2..64,128,257"  # what --all proves unless told otherwise
MOST_RANKS = 512  # n^2 operations of n bits: beyond that a proof needs gigabytes
SIDE_BY_SIDE = 64  # ranks up to which schedules are proved in one pass

Names = Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME ...]")]


class Verify(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prove that schedules are right: every contribution once, no hang, how near the fewest bytes.

    A name is a collective, a schedule or both: `all_reduce`, `ring`, `all_reduce/ring`.
    """

    names: Names = []
    """which schedules"""
    all: bool = False
    """every schedule there is"""
    file: Path | None = None
    """a schedule of your own, in the JSON of `cairn comm export --format json`"""
    ranks: str = PROVED
    """numbers of ranks, such as 8 or 2..64,128"""
    parts: int = 1
    """cut every chunk into this many"""
    capacity: int | None = None
    """chunks that a connection holds; without it the least that does not hang is found"""
    show: bool = False
    """print what every rank does, for the smallest number of ranks"""
    json: bool = False
    """print one JSON document instead of a table"""


class Tune(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Write a file for NCCL's example tuner plugin: which algorithm and protocol for which size.

    Predicts with NCCL's own model; a measured sweep of nccl-tests (--measured) calibrates it. Use it with
    NCCL_TUNER_PLUGIN=libnccl-tuner-example.so and NCCL_TUNER_CONFIG_FILE=FILE.
    """

    fabric: Literal["a100", "h100", "h200", "b200"] = "h200"
    """what the GPUs and their links are"""
    gpus: int = 8
    """of each node"""
    nodes: int = 1
    """how many nodes"""
    nic: float = 50.0
    """GB/s of the network for each GPU"""
    largest: str = "16GiB"
    """the largest message"""
    measured: Path | None = None
    """output of nccl-tests (all_reduce_perf) on this cluster"""
    out: Path | None = None
    """write the file here instead of to the terminal"""
    published: bool = False
    """show instead how far the model is from public sweeps"""
    json: bool = False
    """print one JSON document: rules, calibration, predicted times"""


def run(args: list[str]) -> int:
    return dispatch("comm", ABOUT, SUBVERBS, args)


def run_verify(args: list[str]) -> int:
    options = load(Verify, args=args, env_prefix="CAIRN_COMM_VERIFY_").value
    if options.file is not None:
        return _verify_file(options, options.file)
    wanted = _chosen(options.names, options.all)
    sizes = read_ranks(options.ranks)
    began = time.monotonic()
    proofs: dict[tuple[str, str], list[Proof]] = {}
    with progress(len(wanted), "proving") as advance:
        for collective, name in wanted:
            proofs[collective, name] = _prove(collective, name, sizes, options)
            advance(f"{collective}/{name}")
    seconds = time.monotonic() - began
    ok = all(proof.ok for rows in proofs.values() for proof in rows)
    if options.json:
        _print_json({"ok": ok, "seconds": round(seconds, 3), "schedules": _documents(proofs)})
        return 0 if ok else 1
    if options.show:
        _show(wanted, min(sizes), options.parts)
    _print_proofs(proofs, seconds)
    return 0 if ok else 1


def _verify_file(options: Verify, path: Path) -> int:
    """Verify a schedule from a file, which has its own number of ranks."""
    from cairn.comm.schedule.export import schedule_from
    from cairn.comm.schedule.verify import verify

    if options.names or options.all:
        raise UsageError("--file is one schedule, names and --all are others", hint="ask for one")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", hint="give a file that exists"
        ) from None
    began = time.monotonic()
    schedule = schedule_from(text)
    proof = verify(schedule, options.capacity)
    proofs: dict[tuple[str, str], list[Proof]] = {(schedule.collective, schedule.name): [proof]}
    ok, seconds = proof.ok, time.monotonic() - began
    if options.json:
        _print_json({"ok": ok, "seconds": round(seconds, 3), "schedules": _documents(proofs)})
        return 0 if ok else 1
    if options.show:
        _show_schedule(schedule)
    _print_proofs(proofs, seconds)
    return 0 if ok else 1


def run_tune(args: list[str]) -> int:
    options = load(Tune, args=args, env_prefix="CAIRN_COMM_TUNE_").value
    if options.published:
        return _run_published(options.json)
    from cairn.comm import nccl_tuner
    from cairn.comm.nccl_model import NcclCalibration, calibrate, cluster_of
    from cairn.comm.nccl_tests import read_sweep
    from cairn.core.units import parse_bytes

    cluster = cluster_of(options.fabric, options.gpus, options.nodes, options.nic)
    calibration, error = NcclCalibration(), None
    if options.measured is not None:
        sweep = read_sweep(options.measured)
        calibration, error = calibrate(cluster, sweep)
    rules = nccl_tuner.rules(cluster, calibration, parse_bytes(options.largest))
    text = nccl_tuner.render(cluster, rules)
    if options.out is not None:
        try:
            options.out.write_text(text)
        except OSError as error:
            raise UsageError(
                f"cannot write {options.out}: {error.strerror}", hint="choose another --out"
            ) from None
        sys.stderr.write(f"wrote {options.out}: {len(rules)} rules\n")
    if options.json:
        document = {"cluster": cluster, "calibration": calibration, "median_error": error}
        _print_json({**document, "rules": rules})
    elif options.out is None:
        print(text, end="")
    else:
        _print_rules(rules, error)
    return 0


def _run_published(as_json: bool) -> int:
    from cairn.comm.validate import validate_all

    found = validate_all()
    if as_json:
        _print_json(found)
        return 0
    print(f"{'all-reduce':<22} {'as NCCL':>8} {'3 constants':>12} {'held out':>9} {'worst':>7}")
    for row in found:
        errors = f"{row.uncalibrated:>8.1%} {row.calibrated:>12.1%} {row.held_out:>9.1%} {row.worst:>7.1%}"
        print(f"{row.name:<22} {errors}")
    return 0


def read_ranks(text: str) -> list[int]:
    """[2, 3, 4, 8] from "2..4,8"."""
    sizes: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        try:
            low = int(first)
            high = int(last) if dots else low
        except ValueError:
            raise UsageError(
                f"cannot read the numbers of ranks {text!r}", hint="write 8, or 2..64,128"
            ) from None
        if not 1 <= low <= high <= MOST_RANKS:
            raise UsageError(
                f"'{part.strip()}' is no range of ranks", hint=f"ranks are 1 to {MOST_RANKS}"
            )
        sizes |= set(range(low, high + 1))
    return sorted(sizes)


def _chosen(wanted: list[str], everything: bool) -> list[tuple["Collective", str]]:
    from cairn.comm.schedule.catalogue import names

    known = names()
    if everything == bool(wanted):
        raise UsageError(
            "`cairn comm verify` takes names or --all",
            hint=f"such as all_reduce/ring; there are {len(known)} schedules",
        )
    if everything:
        return known
    chosen = []
    for word in wanted:
        matches = [(c, n) for c, n in known if word in (c, n, f"{c}/{n}")]
        if not matches:
            choices = {c for c, _ in known} | {n for _, n in known} | {f"{c}/{n}" for c, n in known}
            there = "`cairn comm verify --all` lists the schedules"
            raise UsageError(f"no schedule '{word}'", hint=did_you_mean(word, choices, there))
        chosen += [match for match in matches if match not in chosen]
    return chosen


def _prove(collective: "Collective", name: str, sizes: list[int], options: Verify) -> list["Proof"]:
    """Small ones side by side in one pass, large ones alone, so that memory stays small."""
    from cairn.comm.schedule.catalogue import make
    from cairn.comm.schedule.verify import verify_all

    small = [n for n in sizes if n <= SIDE_BY_SIDE]
    groups = ([small] if small else []) + [[n] for n in sizes if n > SIDE_BY_SIDE]
    proofs: list[Proof] = []
    for group in groups:
        made = [make(collective, name, n, parts=options.parts) for n in group]
        proofs += verify_all(made, options.capacity)
    return proofs


def _documents(proofs: dict[tuple[str, str], list["Proof"]]) -> list[dict[str, object]]:
    return [
        {
            "collective": collective,
            "schedule": name,
            "ok": all(proof.ok for proof in rows),
            "proofs": [
                msgspec.to_builtins(proof) | {"times_bound": proof.times_bound} for proof in rows
            ],
        }
        for (collective, name), rows in proofs.items()
    ]


def _print_proofs(proofs: dict[tuple[str, str], list["Proof"]], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    largest = max(proof.ranks for rows in proofs.values() for proof in rows)
    table = Table(title=f"every contribution once, no hang, in any order (steps for n = {largest})")
    table.add_column("schedule", no_wrap=True)
    headings = ("proved", "steps", "messages", "x bytes", "held")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    bad = [proof for rows in proofs.values() for proof in rows if not proof.ok]
    for (collective, name), rows in proofs.items():
        good, last = [proof for proof in rows if proof.ok], rows[-1]
        ratios = [proof.times_bound for proof in rows]
        spread = f"{min(ratios):.2f}" + (
            f"..{max(ratios):.2f}" if max(ratios) > min(ratios) + 0.005 else ""
        )
        table.add_row(
            f"{collective}/{name}",
            f"{len(good)}/{len(rows)}",
            str(last.steps),
            str(last.messages),
            spread,
            str(max(proof.capacity for proof in rows)),
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for proof in bad[:20]:
        console.print(
            f"{proof.collective}/{proof.name}, {proof.ranks} ranks: {proof.problem}", markup=False
        )
    count = sum(map(len, proofs.values()))
    verdict = f"{len(bad)} of {count} not proved" if bad else f"{count} proved"
    console.print(f"{verdict} in {format_duration(seconds)}")


def _show(wanted: list[tuple["Collective", str]], ranks: int, parts: int) -> None:
    from cairn.comm.schedule.catalogue import make

    for collective, name in wanted:
        _show_schedule(make(collective, name, ranks, parts=parts))


def _show_schedule(schedule: "CollectiveSchedule") -> None:
    about = f"{schedule.ranks} ranks, {schedule.chunks} chunks"
    print(f"{schedule.collective}/{schedule.name}, {about}")
    for rank in range(schedule.nodes):
        for channel in range(schedule.channels):
            ops = ", ".join(str(op) for op in schedule.program(rank, channel))
            print(f"  rank {rank} channel {channel}: {ops or 'nothing'}")


def _print_rules(rules: list["TunerRule"], error: float | None) -> None:
    for rule in rules:
        size = f"{format_bytes(rule.least)} .. {format_bytes(rule.most)}"
        print(
            f"{rule.collective:<14} {size:<24} {rule.algorithm}/{rule.protocol} x {rule.channels}"
        )
    if error is not None:
        print(f"calibrated: median error {error:.1%}")


def _print_json(document: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(document)).decode())


SUBVERBS: dict[str, Subverb] = {
    "verify": Subverb(run_verify, "prove schedules for every number of ranks"),
    "export": Subverb(run_export, "write a proved schedule for other programs: GOAL, JSON"),
    "bench": Subverb(run_bench, "time a collective over several backends, as nccl-tests does"),
    "tune": Subverb(run_tune, "a configuration for NCCL's tuner plugin, predicted or calibrated"),
    "doctor": Subverb(run_doctor, "why it is slow or hangs: dumps, logs, sweeps, or a probe"),
    "simulate": Subverb(run_simulate, "a collective on a cluster of up to a hundred thousand GPUs"),
}
