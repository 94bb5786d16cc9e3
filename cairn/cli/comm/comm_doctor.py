"""`cairn comm doctor`: why is it slow, or why does it hang. Prints what `cairn.comm.doctor` concludes.

Exit status: 0 nothing found, 1 something found (or the self-test failed), 2 a file cannot be read.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.core.units import format_duration, parse_bytes
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.comm.doctor.findings import CommFinding, PairProbe

Files = Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="[FILE ...]")]
HEALTHY_RUNS = 20
FEWEST_RANKS, MOST_RANKS = 2, 16


class Doctor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name the cause, with the evidence: message too small, wrong interface, transport downgrade, rank mapping,
    slow link or host, straggler, hang, mismatch.

    Reads flight-recorder dumps of torch or of our backend (one for each rank, the rank last in the name), logs of NCCL
    (NCCL_DEBUG=INFO), JSON of NCCL Inspector, output of nccl-tests, and folders of them. --probe measures ranks
    itself; under torchrun it joins the ranks that torchrun started, on all their hosts.
    """

    files: Files = []
    """dumps, logs, sweeps, or folders of them"""
    sizes: list[str] = []
    """messages that the job sends, such as 64KiB, to judge a sweep by"""
    probe: bool = False
    """measure every pair of ranks now"""
    ranks: int = 4
    """of --probe on this host"""
    bytes: str = "64KiB"
    """of a message of --probe"""
    out: Path | None = None
    """write what --probe measured to this file"""
    selftest: bool = False
    """inject every fault and see that it is named, then look for findings where there are none"""
    healthy: Annotated[int, msgspec.Meta(ge=0)] = HEALTHY_RUNS
    """healthy runs of --selftest"""
    only: str | None = None
    """of --selftest: cases whose name contains this"""
    json: bool = False
    """print one JSON document"""


def run_doctor(args: list[str]) -> int:
    options = load(Doctor, args=args, env_prefix="CAIRN_COMM_DOCTOR_").value
    if sum([bool(options.files), options.probe, options.selftest]) != 1:
        raise UsageError(
            "`cairn comm doctor` takes files, --probe or --selftest",
            hint="for a job that hangs, give the flight-recorder dumps of all its ranks",
        )
    if options.selftest:
        return _selftest(options)
    return _probe(options) if options.probe else _files(options)


def _files(options: Doctor) -> int:
    from cairn.comm.doctor.diagnose import diagnose

    found = diagnose(options.files, [parse_bytes(size) for size in options.sizes])
    if options.json:
        _print_json({"findings": found.findings, "read": found.read})
    else:
        kinds = sorted(set(found.read.values()))
        print(f"read {len(found.read)} file(s): {', '.join(kinds)}")
        _print_findings(found.findings)
    return 1 if found.findings else 0


def _probe(options: Doctor) -> int:
    from cairn.comm.doctor.pairs import examine_probe

    size = parse_bytes(options.bytes)
    if not FEWEST_RANKS <= options.ranks <= MOST_RANKS or not 1 <= size <= 1 << 30:
        raise UsageError(
            f"a probe of {options.ranks} ranks and {size} bytes",
            hint=f"{FEWEST_RANKS} to {MOST_RANKS} ranks here, 1 byte to 1 GiB",
        )
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise UsageError(f"cannot write {options.out}: there is no folder {options.out.parent}")
    probe = _measured(options.ranks, size)
    if probe is None:
        return 0  # rank 0 speaks
    if options.out is not None:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(probe)))
    found = examine_probe(probe)
    if options.json:
        _print_json({"findings": found, "probe": probe})
    else:
        _print_pairs(probe)
        _print_findings(found)
    return 1 if found else 0


def _measured(ranks: int, size: int) -> "PairProbe | None":
    import os

    from cairn.comm.doctor.probe import TRIES, measure_joined, probe_surely

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return measure_joined(size, TRIES)
    with progress(1, f"probing {ranks} ranks") as advance:
        probe = probe_surely(ranks, size=size)
        advance("done")
    return probe


def _selftest(options: Doctor) -> int:
    from cairn.comm.doctor.selftest import cases, run_case, run_healthy

    chosen = [case for case in cases() if not options.only or options.only in case.name]
    if not chosen:
        names = ", ".join(case.name for case in cases())
        raise UsageError(f"no case is called '{options.only}'", hint=f"there are: {names}")
    verdicts, health = [], []
    with progress(len(chosen) + options.healthy, "injecting faults") as advance:
        for case in chosen:
            verdicts.append(run_case(case))
            advance(case.name)
        for seed in range(options.healthy):
            health.append(run_healthy(seed))
            advance(f"healthy {seed + 1}")
    right = sum(verdict.right for verdict in verdicts)
    alarms = sum(not verdict.right for verdict in health)
    ok = right == len(verdicts) and not alarms
    if options.json:
        _print_json({
            "ok": ok, "faults": len(verdicts), "named_rightly": right, "healthy_runs": len(health),
            "false_alarms": alarms, "cases": [*verdicts, *health],
        })  # fmt: skip
        return 0 if ok else 1
    for verdict in [*verdicts, *(row for row in health if not row.right)]:
        mark = "ok   " if verdict.right else "WRONG"
        said = "; ".join(verdict.named) or "nothing"
        print(
            f"{mark} {verdict.name:<28} {said}  ({verdict.by}, {format_duration(verdict.seconds)})"
        )
    print(
        f"{right} of {len(verdicts)} faults named, {alarms} false alarms in {len(health)} healthy runs"
    )
    return 0 if ok else 1


def _print_findings(found: list["CommFinding"]) -> None:
    if not found:
        print("nothing found")
    for one in found:
        print(f"\n{one.cause}: {one.where}")
        for line in one.evidence:
            print(f"  because {line}")
        print(f"  do      {one.advice}")


def _print_pairs(probe: "PairProbe") -> None:
    """The best time of each pair."""
    print(
        f"{probe.bytes} bytes sent and acknowledged, the best of all tries, in us (row: sender, column: receiver)"
    )
    print("      " + "".join(f"{rank:>9}" for rank in range(len(probe.pair_us))))
    for rank, row in enumerate(probe.pair_us):
        cells = "".join(f"{min(times):9.0f}" if times else f"{'-':>9}" for times in row)
        print(f"{rank:>5} {cells}")


def _print_json(document: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(document)).decode())
