"""`cairn comm export`: a proved schedule for other programs. Writes what `cairn.comm.schedule.export` makes."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.errors import UsageError, did_you_mean
from cairn.core.units import parse_bytes

if TYPE_CHECKING:
    from cairn.comm.schedule.ops import CollectiveSchedule

Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="COLLECTIVE/SCHEDULE")]
MOST_RANKS = 512


class Export(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Write a schedule for other programs, after proving it: GOAL (LogGOPSim, ATLAHS), or JSON with every operation.

    What JSON says, `cairn comm verify --file` proves again, as any other such file.
    """

    name: Name
    """such as all_reduce/ring; `cairn comm verify --all` lists them"""
    ranks: int = 8
    """how many"""
    size: str = "1MiB"
    """of the whole vector"""
    format: Literal["goal", "json"] = "goal"
    """what is written"""
    gpus: int | None = None
    """of a node, for two_level and two_hop"""
    chunks: int = 4
    """of a pipeline: tree, chain, switch"""
    parts: int = 1
    """cut every chunk into this many"""
    channels: int = 1
    """deal the parts out to so many"""
    root: int = 0
    """of broadcast and reduce"""
    sum_rate: float = 0.0
    """GB/s at which a rank adds and copies, as time in GOAL; 0: none"""
    out: Path | None = None
    """write to this file instead of to the terminal"""


def run_export(args: list[str]) -> int:
    options = load(Export, args=args, env_prefix="CAIRN_COMM_EXPORT_").value
    schedule = _proved(options)
    text = _text(options, schedule)
    if options.out is None:
        sys.stdout.writelines(text)
        return 0
    try:
        with options.out.open("w") as file:
            file.writelines(text)
    except OSError as error:
        raise UsageError(
            f"cannot write {options.out}: {error.strerror}", hint="choose another --out"
        ) from None
    sys.stderr.write(f"wrote {options.out}: {schedule.operations} operations, proved\n")
    return 0


def _proved(options: Export) -> "CollectiveSchedule":
    from cairn.comm.schedule.catalogue import make, names
    from cairn.comm.schedule.verify import require

    known = {f"{collective}/{name}": (collective, name) for collective, name in names()}
    if options.name not in known:
        hint = did_you_mean(options.name, known, "such as all_reduce/ring")
        raise UsageError(f"no schedule '{options.name}'", hint=hint)
    if not 1 <= options.ranks <= MOST_RANKS:
        raise UsageError(f"{options.ranks} ranks", hint=f"1 to {MOST_RANKS}")
    collective, name = known[options.name]
    schedule = make(
        collective, name, options.ranks, gpus=options.gpus, chunks=options.chunks,
        parts=options.parts, channels=options.channels, root=options.root,
    )  # fmt: skip
    require(schedule)
    return schedule


def _text(options: Export, schedule: "CollectiveSchedule") -> Iterable[str]:
    from cairn.comm.schedule.export import document, goal

    size = parse_bytes(options.size)
    if options.format == "json":
        written = document(schedule, size)
        return [msgspec.json.format(msgspec.json.encode(written), indent=1).decode() + "\n"]
    return (f"{line}\n" for line in goal(schedule, size, options.sum_rate))
