"""Provenance of a record: command, commit and versions, without which a result cannot be reproduced.

    {command, commit, date, device, versions, ...results}

`cairn bench` and the programs in benchmarks/ write their results through it. Knows nothing about what was measured.
"""

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cairn.core.errors import DataError, UsageError
from cairn.hw.versions import read_versions

Document = TypeVar("Document")
Kept = TypeVar("Kept")  # a row of a record
REPOSITORY = Path(__file__).resolve().parents[2]


class RecordOrigin(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    commit: str
    date: str  # UTC, ISO 8601
    device: str
    versions: dict[str, str]


def origin(command: str, device: str, commit: str | None = None) -> RecordOrigin:
    versions = msgspec.to_builtins(read_versions(Path("/")))
    return RecordOrigin(
        command=command,
        commit=commit or current_commit() or "unknown",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        device=device,
        versions={name: value for name, value in versions.items() if value},
    )


def repeatable(verb: Sequence[str], args: Sequence[str]) -> str:
    """The command line that measures the same again."""
    return shlex.join(["cairn", *verb, *_without_places(args)])


def program_command() -> str:
    """The command line that runs this program of benchmarks/ again."""
    return shlex.join(["python", *_without_places(sys.argv)])


def _without_places(args: Sequence[str]) -> list[str]:
    """Arguments without those that only say where the result goes; paths as another machine may have them."""
    remaining: list[str] = []
    skip = False
    for argument in args:
        name, equals, value = argument.partition("=")
        if not skip and name not in ("--out", "--commit", "--merge", "--json"):
            is_flag = bool(equals) and name.startswith("-")
            remaining.append(f"{name}={_elsewhere(value)}" if is_flag else _elsewhere(argument))
        skip = argument in ("--out", "--commit")
    return remaining


def _elsewhere(argument: str) -> str:
    """A path without the folders of this machine: relative to the repository, or the name alone outside of it."""
    path = Path(argument)
    if not path.is_absolute() and ".." not in path.parts:
        return argument
    absolute = path.resolve()
    inside = absolute.is_relative_to(REPOSITORY)
    return str(absolute.relative_to(REPOSITORY)) if inside else absolute.name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a program in benchmarks/ that `record` reads."""
    parser.add_argument("--out", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--commit", help="the commit that runs, where there is no git")


def record(
    results: object, options: argparse.Namespace, before: str | None = None, show: bool = True
) -> None:
    """Print the result of a program in benchmarks/ with its origin; write it where `--out` says.

    `before`: the commands that made the inputs, or measured what the file had already.
    """
    require_commit(options.commit)
    command = all_commands(before, program_command())
    provenance = msgspec.to_builtins(origin(command, _device(options), options.commit))
    document = provenance | {"results": results}
    if options.out:
        write(document, options.out)
    if not show:
        return
    print(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())


def _device(options: argparse.Namespace) -> str:
    """The GPU, unless the program ran beside it; of the CPUs those that this process may use."""
    import torch

    if torch.cuda.is_available() and getattr(options, "device", None) != "cpu":
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs"


def require_commit(commit: str | None) -> None:
    """Refuse before an hour of measuring, and not after it."""
    if commit is None and current_commit() is None:
        raise UsageError(
            "no git here, so the commit that is measured is unknown",
            hint="give it with --commit",
        )


def write(document: object, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    fresh.replace(path)


def read(path: Path, kind: type[Document], verb: str) -> Document:
    """A record that `verb` wrote before."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        hint = f"is it a file of `cairn bench {verb} --out`?"
        raise DataError(f"cannot read {path}: {error}", hint=hint) from None


def not_again(
    old: Sequence[Kept], fresh: Sequence[Kept], key: Callable[[Kept], object]
) -> list[Kept]:
    """The old rows that have not been measured again."""
    measured = {key(row) for row in fresh}
    return [row for row in old if key(row) not in measured]


def merged(
    origin: RecordOrigin,
    rows: Sequence[Kept],
    old: Any,
    key: Callable[[Kept], object],
    group: Callable[[Kept], object],
) -> dict[str, Any]:
    """Fields of a report: its origin, the new rows, and of an old report those that were not measured again."""
    unmeasured = not_again(old.rows, rows, key) if old else []
    fresh = [msgspec.structs.replace(row, commit=origin.commit) for row in rows]  # type: ignore[bad-specialization]
    before = old.command if old and unmeasured else None
    fields = msgspec.structs.asdict(origin)
    return fields | {
        "command": all_commands(before, origin.command),
        "rows": grouped([*unmeasured, *fresh], group),
    }


def grouped(rows: Sequence[Kept], group: Callable[[Kept], object]) -> list[Kept]:
    """Rows of one group side by side, groups in the order of their first row."""
    order = {name: place for place, name in enumerate(dict.fromkeys(map(group, rows)))}
    return sorted(rows, key=lambda row: order[group(row)])


def all_commands(before: str | None, now: str) -> str:
    """The commands that reproduce everything in a record."""
    return "; ".join(dict.fromkeys([*(before.split("; ") if before else []), now]))


def current_commit() -> str | None:
    """The commit of Cairn's own sources, with a mark when they have been changed since."""
    head = _git(REPOSITORY, "rev-parse", "--short", "HEAD")
    if not head:
        return None
    return f"{head}+changes" if _git(REPOSITORY, "status", "--porcelain", "--", "cairn") else head


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        process = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:  # not installed
        return None
    return process.stdout.strip() if process.returncode == 0 else None
