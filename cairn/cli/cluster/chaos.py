"""`cairn chaos`: break a job on purpose, and see what that costs. Shows the report; breaks nothing itself."""

import sys
import tempfile
from pathlib import Path

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.core.units import format_duration


class Chaos(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run a training job, inject the faults of a plan, and report what they cost.

    Faults: kill, stop, slow, partition, fill-disk, corrupt-checkpoint, flip-bit.

    The job is a supervised training run (`--recovery.on`). Exit status 1: a promise of the plan was not kept.
    Plans: examples/chaos/.
    """

    plan: tyro.conf.Positional[Path]
    """a TOML file: the job and the faults"""
    out: Path | None = None
    """keep the runs in this folder; by default they are removed"""
    times: int = 0
    """as many of each fault instead of what the plan says; 0: as it says"""
    seed: int = -1
    """another seed than the plan's; -1: the plan's"""
    json: bool = False
    """print the report as JSON; lines go to stderr"""


def run(args: list[str]) -> int:
    options = load(Chaos, args=args, env_prefix="CAIRN_CHAOS_").value
    from cairn.cluster.chaos import run_chaos
    from cairn.cluster.chaos_plan import read_plan

    if options.times < 0:
        raise UsageError(f"--times is {options.times}", hint="how many of each fault, such as 50")
    plan = read_plan(options.plan)
    if options.seed >= 0:
        plan = msgspec.structs.replace(plan, seed=options.seed)
    if options.times:
        faults = [msgspec.structs.replace(fault, times=options.times) for fault in plan.faults]
        plan = msgspec.structs.replace(plan, faults=faults)

    def log_line(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if options.out is not None:
        report = run_chaos(plan, options.out, log_line)
    else:
        with tempfile.TemporaryDirectory(prefix="cairn-chaos-") as folder:
            report = run_chaos(plan, Path(folder), log_line)
        report = msgspec.structs.replace(report, folder="")  # it is not there any more
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _print_outcome(report)
    return 0 if report.fine else 1


def _print_outcome(report: "object") -> None:
    from cairn.cluster.chaos import ChaosReport

    assert isinstance(report, ChaosReport)
    for one in report.faults:
        if one.skipped:
            print(f"{one.kind} {one.target}: skipped, {one.skipped}")
            continue
        found = (
            "not noticed"
            if one.found_s is None
            else f"found after {one.found_s:.2f} s ({one.cause})"
        )
        back = (
            "" if one.recovered_s is None else f", back after {one.recovered_s:.2f} s by {one.rung}"
        )
        lost = "" if one.steps_lost is None else f", {one.steps_lost} steps lost"
        print(f"step {one.step}: {one.kind} {one.target}: {found}{back}{lost}")
    if report.same_losses is not None:
        words = (
            "the same to the last bit"
            if report.same_losses
            else f"different by up to {report.worst_difference:.3g}"
        )
        print(f"losses beside the unbroken run: {words}")
    if report.ledger is not None:
        print(report.ledger.line())
    if report.said:
        print(report.said)
    skipped = sum(bool(one.skipped) for one in report.faults)
    some = f", {skipped} of {len(report.faults)} faults skipped" if skipped else ""
    verdict = "every promise kept" if report.fine else f"BROKEN: {'; '.join(report.complaints)}"
    print(f"{report.plan}: {verdict}{some}, in {format_duration(report.seconds)}")
