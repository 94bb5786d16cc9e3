"""`cairn calibrate`: how fast is this machine at best?

Measures, writes `machine.json`, and prints each ceiling beside what the vendor promises. The table
is for a person; planner, profiler and tests read the file. Measures nothing itself.
"""

import sys
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cairn.core.config import load
from cairn.core.prose import in_terminal
from cairn.core.units import format_duration, format_rate
from cairn.report.progress import Bar

if TYPE_CHECKING:
    from cairn.hw.calibrate import Progress
    from cairn.hw.ceilings import Ceilings, Measured
    from cairn.hw.machine import Machine


class Calibrate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measure this machine's ceilings: memory, matmul, launches, transfers, disk, loopback."""

    quick: bool = False
    """Take a few seconds instead of half a minute; the numbers have a wider spread."""
    json: bool = False
    """Print one JSON document instead of a table."""
    out: Path | None = None
    """Write the ceilings to this file instead of machine.json in the cache."""


NOISY = 0.5  # a spread that makes the median doubtful


class Row(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    measured: "Measured"
    promised: float | None = None  # by a datasheet, in the unit of the measured value

    @property
    def spread(self) -> float:
        """Width of the middle 80% of the runs, as a share of the median."""
        return (self.measured.high - self.measured.low) / self.measured.value

    @property
    def share(self) -> float | None:
        return self.measured.value / self.promised if self.promised else None


def run(args: list[str]) -> int:
    options = load(Calibrate, args=args, env_prefix="CAIRN_CALIBRATE_").value

    from cairn.hw import ceilings
    from cairn.hw.calibrate import calibrate
    from cairn.hw.probe import probe

    path = options.out or ceilings.machine_file()
    ceilings.require_writable(path)
    machine = probe()
    with progress_bar() as progress:
        measured = calibrate(machine, quick=options.quick, progress=progress)
    ceilings.save(measured, path)
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(measured)).decode() + "\n")
    else:
        _print(measured, machine)
    sys.stderr.write(f"wrote {path}\n")
    return 0


def table_rows(ceilings: "Ceilings", machine: "Machine") -> list[Row]:
    """Every ceiling that was measured, in the order of the fields, with the vendor's number."""
    from cairn.hw.datasheet import find_chip, pcie_rate

    chip, _ = find_chip(ceilings.device_name)
    link = machine.gpus[0].pcie if machine.gpus and ceilings.device != "cpu" else None
    bus = pcie_rate(link.max_generation, link.max_width) if link else None
    promised: dict[str, float | None] = {"copy": chip.bytes_per_s if chip else None}
    promised |= {f"{way}_pinned": bus for way in ("host_to_device", "device_to_host")}
    rows = []
    for name in msgspec.structs.asdict(ceilings):
        value = getattr(ceilings, name)
        if name == "matmul":
            rates = chip.flops_per_s if chip else {}
            rows += [
                Row(label=f"{dtype} matmul", measured=rate, promised=rates.get(dtype))
                for dtype, rate in value.items()
            ]
        elif name == "host_copy" and ceilings.device == "cpu":
            continue  # the row "memory copy" says it
        elif name in LABELS and value is not None:
            rows.append(Row(label=LABELS[name], measured=value, promised=promised.get(name)))
    return rows


LABELS = {
    "copy": "memory copy",
    "launch": "launch from Python",
    "launch_in_graph": "launch in a CUDA graph",
    "host_to_device_pinned": "host to device (pinned)",
    "host_to_device_pageable": "host to device (pageable)",
    "device_to_host_pinned": "device to host (pinned)",
    "device_to_host_pageable": "device to host (pageable)",
    "host_copy": "host memory copy",
    "disk_write": "disk write + fsync",
    "disk_read_cold": "disk read (cold)",
    "disk_read_warm": "disk read (page cache)",
    "loopback_round_trip": "loopback round trip",
    "loopback_throughput": "loopback throughput",
}


def show(value: float, unit: str) -> str:
    if unit == "s":
        return format_duration(value)
    return format_rate(value, "FLOP" if unit == "FLOP/s" else "B")


def _print(ceilings: "Ceilings", machine: "Machine") -> None:
    from rich.console import Console
    from rich.table import Table

    versions = machine.versions
    title = f"{ceilings.device_name} ({ceilings.device}), torch {versions.torch}"
    table = Table(title=title + (f", driver {versions.driver}" if versions.driver else ""))
    table.add_column("ceiling")
    for heading in ("measured", "spread", "datasheet", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = table_rows(ceilings, machine)
    for row in rows:
        table.add_row(*_cells(row))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for reason, names in _reasons(ceilings).items():
        said = in_terminal(f"not measured: {', '.join(names)} ({reason})")
        console.print(said, style="dim", markup=False)
    noisy = [row.label for row in rows if row.spread > NOISY]
    if noisy:
        said = f"wide spread: {', '.join(noisy)}; was something else running?"
        console.print(in_terminal(said))


def _cells(row: Row) -> list[str]:
    measured = row.measured
    return [
        row.label,
        show(measured.value, measured.unit),
        f"{row.spread:.0%}",
        show(row.promised, measured.unit) if row.promised else "",
        f"{row.share:.0%}" if row.share is not None else "",
    ]


def _reasons(ceilings: "Ceilings") -> dict[str, list[str]]:
    """Group missing ceilings by reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in ceilings.absent.items():
        reasons[reason].append(LABELS.get(name, f"{name.removeprefix('matmul.')} matmul"))
    return reasons


@contextmanager
def progress_bar() -> Generator["Progress | None"]:
    """A bar on stderr where a person watches; nothing in a log."""
    with Bar("starting", 1) as bar:
        if not bar.shown:
            yield None
            return

        def show(label: str, done: int, total: int) -> None:
            bar.what, bar.total = label, total
            bar.update(done, now=True)

        yield show
