"""`cairn doctor`: is everything here fit to run?

Prints what `cairn.hw.diagnose` finds, and leaves with 1 when something fails; warnings leave with
0. Decides nothing itself.
"""

import sys
from typing import TYPE_CHECKING

import msgspec

from cairn.core.config import load
from cairn.core.prose import in_terminal

if TYPE_CHECKING:
    from cairn.hw.findings import HardwareVerdict


class Doctor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Is everything here fit to run? Each check says why, and what to do about it."""

    json: bool = False
    """Print one JSON document instead of lines."""


SYMBOLS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}


def run(args: list[str]) -> int:
    options = load(Doctor, args=args, env_prefix="CAIRN_DOCTOR_").value

    from cairn.hw.diagnose import diagnose, overall
    from cairn.hw.evidence import collect

    evidence = collect()
    verdicts = diagnose(evidence)
    status = overall(verdicts)
    if options.json:
        document = {"status": status, "checks": verdicts, "machine": evidence.machine}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")
    else:
        _print(verdicts)
    return 1 if status == "fail" else 0


def _print(verdicts: list["HardwareVerdict"]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    width = max((len(verdict.name) for verdict in verdicts), default=0)
    for verdict in verdicts:
        said = in_terminal(f"  {verdict.name:<{width}}  {verdict.why}", " " * (width + 4))
        console.print(f"{SYMBOLS[verdict.status]} {escape(said[2:])}")
        if verdict.fix:
            console.print(f"  {'':<{width}}  [dim]fix: {escape(verdict.fix)}[/]")
    count = {status: sum(v.status == status for v in verdicts) for status in SYMBOLS}
    console.print(f"\n{count['ok']} ok, {count['warn']} to look at, {count['fail']} failed")
