"""`cairn trace`: event files of one or more processes as one timeline for https://ui.perfetto.dev."""

from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.trace import TraceWindow, find_files, write_trace
from cairn.core.units import format_duration, parse_duration


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Merge event files into one timeline for https://ui.perfetto.dev.

    Any command records its events when CAIRN_EVENTS names a folder.
    """

    paths: Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="PATHS")]
    """event files, or folders of them"""
    out: Path = Path("trace.json")
    """where to write the timeline"""
    begin: Annotated[str | None, tyro.conf.arg(name="from", metavar="TIME")] = None
    """leave out what ended before this time, counted from the first process: 1.5s, 2m 05s"""
    end: Annotated[str | None, tyro.conf.arg(name="to", metavar="TIME")] = None
    """leave out what began after this time"""
    json: bool = False
    """print a summary as JSON"""


def run(args: list[str]) -> int:
    options = load(Trace, args=args, env_prefix="CAIRN_TRACE_").value
    window = TraceWindow(
        start_s=parse_duration(options.begin) if options.begin else 0.0,
        end_s=parse_duration(options.end) if options.end else float("inf"),
    )
    summary = write_trace(find_files(options.paths), options.out, window)
    if options.json:
        print(msgspec.json.encode(summary).decode())
        return 0
    print(
        f"wrote {summary.out}: {summary.processes} processes, {summary.events} events, "
        f"{format_duration(summary.seconds)}; open it in https://ui.perfetto.dev"
    )
    if summary.dropped:
        print(f"{summary.dropped} events are missing: they came faster than they could be written")
    return 0
