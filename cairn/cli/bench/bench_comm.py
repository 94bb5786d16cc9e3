"""`cairn bench comm --transfer`: prints what `cairn.bench.transfer` measures, and measures nothing itself."""

import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cairn.core.config import load
from cairn.core.errors import UsageError, did_you_mean
from cairn.core.units import format_bytes, format_duration
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.bench.transfer import TransferReport, TransferRow


class BenchComm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Move bytes between two processes: by transport and by length of run, beside memcpy.

    Collectives are measured by `cairn comm bench`.
    """

    transfer: bool = False
    """measure KV and weight transfer (the only measurement here)"""
    transports: str = "tcp,shm,nixl"
    """which, with commas between them; one that is not installed is left out, with the reason"""
    repeats: int = 5
    """samples of each; the best counts"""
    out: Path | None = None
    """write the result as JSON to this file"""
    commit: str | None = None
    """the commit that runs, where there is no git"""
    json: bool = False
    """print one JSON document instead of tables"""


def run(args: list[str]) -> int:
    options = load(BenchComm, args=args, env_prefix="CAIRN_BENCH_COMM_").value
    if not options.transfer:
        raise UsageError(
            "cairn bench comm measures transfers only",
            hint="cairn bench comm --transfer; collectives: cairn comm bench all_reduce",
        )
    if options.repeats < 1:
        raise UsageError(f"--repeats {options.repeats}", hint="at least 1")
    from cairn.bench import record, transfer

    kinds, skipped = transfer.usable(read_transports(options.transports))
    if options.out is not None:
        record.require_commit(options.commit)
    found: list[object] = []
    work = transfer.tasks(kinds, options.repeats)
    with progress(len(work), "measuring") as advance:
        for label, measure in work:
            found += measure()
            advance(label)
    report = transfer.TransferReport(
        origin=record.origin(
            record.repeatable(["bench", "comm"], args), platform.machine(), options.commit
        ),
        paths=transfer.paths_here(),
        skipped=skipped,
        moves=[one for one in found if isinstance(one, transfer.TransferRow)],
        hand_overs=[one for one in found if isinstance(one, transfer.HandOver)],
        streamed=[one for one in found if isinstance(one, transfer.Streamed)],
        deaths=[one for one in found if isinstance(one, transfer.Death)],
    )
    if options.out is not None:
        record.write(report, options.out)
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        print_report(report)
    return 0


def read_transports(text: str) -> list[str]:
    from cairn.comm.transfer.choose_transport import TRANSPORTS

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TRANSPORTS:
            hint = did_you_mean(name, TRANSPORTS, otherwise=f"there are: {', '.join(TRANSPORTS)}")
            raise UsageError(f"no transport {name!r}", hint=hint)
    if not names:
        raise UsageError("--transports names none", hint=f"there are: {', '.join(TRANSPORTS)}")
    return list(dict.fromkeys(names))


def print_report(report: "TransferReport") -> None:
    paths = report.paths
    print(f"between machines: {paths.between} ({paths.why}); on this one: {paths.within}")
    for kind, reason in report.skipped.items():
        print(f"{kind} is left out: {reason}")
    _print_moves(report.moves)
    print("\nhand-over of a cache (512 tokens of Qwen3-0.6B)")
    print(f"  {'':<30} {'transport':<9} {'runs':>8} {'plan':>9} {'time':>9} {'GB/s':>7}")
    for one in report.hand_overs:
        times = f"{format_duration(one.plan_s):>9} {format_duration(one.best_s):>9}"
        print(f"  {one.what:<30} {one.transport:<9} {one.runs:>8} {times} {one.gb_per_s:>7.2f}")
    print("\nfrom the end of a prefill to the last byte")
    for one in report.streamed:
        whole, streamed = format_duration(one.after_s), format_duration(one.exposed_s)
        print(f"  {one.transport:<9} all at the end {whole:>9}   layer by layer {streamed:>9}")
    print("\nuntil a peer's death is seen")
    for one in report.deaths:
        killed, frozen = format_duration(one.killed_s), format_duration(one.frozen_s)
        print(f"  {one.transport:<9} killed {killed:>9}   frozen {frozen:>9}")


def _print_moves(rows: list["TransferRow"]) -> None:
    columns = list(dict.fromkeys((row.transport, row.way) for row in rows))
    cells = {(row.run_bytes, row.transport, row.way): row.gb_per_s for row in rows}
    print("\nscattered runs between two processes, GB/s")
    print(f"  {'run':>8} " + " ".join(f"{kind + ' ' + way:>12}" for kind, way in columns))
    for size in dict.fromkeys(row.run_bytes for row in rows):
        numbers = (f"{cells[size, *column]:>12.2f}" for column in columns)
        print(f"  {format_bytes(size):>8} " + " ".join(numbers))
