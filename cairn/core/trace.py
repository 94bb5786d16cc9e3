"""Event files of several processes as one timeline that Perfetto and chrome://tracing open.

    serve-41.jsonl  --.
    serve-42.jsonl  ---+--> trace.json: a row per process and thread, one time axis
    serve-43.jsonl  --'

Time zero is the moment when the first process began to record. Processes of one boot of one machine
share a monotonic clock and are aligned to the nanosecond; others are aligned by their wall clocks,
as well as NTP keeps those. Files are read twice and never held in memory. Knows nothing about what
was recorded.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from cairn.core.errors import UsageError
from cairn.core.records import (
    VERSION,
    Dropped,
    Instant,
    Process,
    Record,
    Scalar,
    Span,
    Thread,
    read,
)


class TraceWindow(msgspec.Struct, frozen=True):
    """Time range to export, in seconds. Spans that overlap it are exported completely."""

    start_s: float = 0.0
    end_s: float = float("inf")

    def holds(self, start_ns: int, end_ns: int) -> bool:
        return start_ns <= self.end_s * 1e9 and end_ns >= self.start_s * 1e9


class TraceSummary(msgspec.Struct, frozen=True):
    """Summary of a written trace."""

    out: str
    processes: int
    events: int
    dropped: int  # events that the processes could not record
    seconds: float  # from time zero to the end of the last event


class TraceSource(msgspec.Struct, frozen=True):
    """An event file with its offset on the common time axis."""

    path: Path
    process: Process
    number: int  # its pid in the trace: the real one may exist on two hosts
    offset_ns: int  # add it to a monotonic time to get nanoseconds after time zero


class Track(msgspec.Struct, frozen=True):
    """A row of a timeline that is made from memory: spans of one clock, those inside others included."""

    process: str  # rows of the same one are drawn together
    name: str
    spans: Sequence[Span]


def timeline(tracks: Sequence[Track], name: str) -> dict[str, Any]:
    """The trace document of `write_trace` for given spans; time zero is the start of the first span."""
    zero = min((span.start_ns for track in tracks for span in track.spans), default=0)
    numbers: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for row, track in enumerate(tracks, start=1):
        new = track.process not in numbers
        number = numbers.setdefault(track.process, len(numbers) + 1)
        process = Process(VERSION, track.process, number, "", "", None, 0, 0)
        source = TraceSource(Path(name), process, number, -zero)
        if new:
            labels = {"labels": name}
            events.append(_metadata("process_name", source, 0, {"name": track.process}))
            events.append(_metadata("process_labels", source, 0, labels))
            events.append(_metadata("process_sort_index", source, 0, {"sort_index": number}))
        events.append(_metadata("thread_name", source, row, {"name": track.name}))
        events += [
            _event(source, msgspec.structs.replace(span, thread=row)) for span in track.spans
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The event files that are meant: a file is itself, a folder is every .jsonl in it."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise UsageError(
            f"no event files (*.jsonl) in {', '.join(map(str, paths)) or 'nothing'}",
            hint="run a command with CAIRN_EVENTS=FOLDER to record some",
        )
    return list(dict.fromkeys(files))


def make_place(out: Path | None, flag: str = "--out") -> None:
    """The folder of a file to come: who cannot write there hears it before the work, not after."""
    if out is None:
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        reason = "it is a folder" if out.is_dir() else None
        reason = reason or (None if os.access(out.parent, os.W_OK) else "permission denied")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    if reason is not None:
        raise UsageError(f"cannot write {out}: {reason}", hint=f"choose another place with {flag}")


def write_trace(
    files: Sequence[Path], out: Path, window: TraceWindow | None = None
) -> TraceSummary:
    """Reads the files and writes the trace, whole or not at all."""
    window = window or TraceWindow()
    sources = align(files)
    events, dropped, end_ns = 0, 0, 0
    unfinished = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
            separator = b"\n"
            for source in sources:
                for record, event in _events(source, window):
                    file.write(separator + _encoder.encode(event))
                    separator = b",\n"
                    events += isinstance(record, Span | Instant | Scalar)
                    dropped += record.count if isinstance(record, Dropped) else 0
                    end_ns = max(end_ns, _bounds(record)[1] + source.offset_ns)
            file.write(b"\n]}\n")
        unfinished.replace(out)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"cannot write {out}: {reason}", hint="choose another place with --out"
        ) from None
    finally:
        with suppress(OSError):  # after a success it is gone already
            unfinished.unlink()
    return TraceSummary(str(out), len(sources), events, dropped, end_ns / 1e9)


def align(files: Iterable[Path]) -> list[TraceSource]:
    """The processes of the files on one time axis, by rank, then by start."""
    processes: list[tuple[Path, Process]] = []
    for path in files:
        if (first := next(read(path), None)) is not None:
            assert isinstance(first, Process)  # read has checked it
            processes.append((path, first))
    # One clock per boot: the first process to start says what time it is there. Two processes of
    # one boot then stay together even if the wall clock is set between their starts.
    clocks: dict[str, Process] = {}
    for path, process in sorted(processes, key=lambda item: item[1].monotonic_ns):
        clocks.setdefault(process.boot or str(path), process)
    starts: list[tuple[Path, Process, int]] = []
    for path, process in processes:
        clock = clocks[process.boot or str(path)]
        starts.append((path, process, clock.wall_ns - clock.monotonic_ns))
    zero_ns = min((process.monotonic_ns + to_wall for _, process, to_wall in starts), default=0)
    starts.sort(
        key=lambda item: (item[1].rank is None, item[1].rank, item[1].monotonic_ns + item[2])
    )
    return [
        TraceSource(path, process, number, to_wall - zero_ns)
        for number, (path, process, to_wall) in enumerate(starts, start=1)
    ]


def _events(source: TraceSource, window: TraceWindow) -> Iterator[tuple[Record, dict[str, Any]]]:
    """The trace events of one file, each with the record it is made from."""
    for record in read(source.path):
        if isinstance(record, Process):
            for event in _process_events(source):
                yield record, event
        elif isinstance(record, Thread):
            yield record, _metadata("thread_name", source, record.thread, {"name": record.name})
        else:
            start_ns, end_ns = _bounds(record)
            if window.holds(start_ns + source.offset_ns, end_ns + source.offset_ns):
                yield record, _event(source, record)


def _bounds(record: Record) -> tuple[int, int]:
    match record:
        case Span():
            return record.start_ns, record.start_ns + record.duration_ns
        case Instant() | Scalar() | Dropped():
            return record.at_ns, record.at_ns
        case Process():
            return record.monotonic_ns, record.monotonic_ns
        case Thread():
            return 0, 0


def _process_events(source: TraceSource) -> list[dict[str, Any]]:
    process = source.process
    rank = "" if process.rank is None else f" rank {process.rank}"
    return [
        _metadata("process_name", source, 0, {"name": f"{process.name}{rank}"}),
        _metadata("process_labels", source, 0, {"labels": f"pid {process.pid} on {process.host}"}),
        _metadata("process_sort_index", source, 0, {"sort_index": source.number}),
    ]


def _metadata(
    name: str, source: TraceSource, thread: int, values: dict[str, Any]
) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": source.number, "tid": thread, "args": values}


def _event(source: TraceSource, record: Span | Instant | Scalar | Dropped) -> dict[str, Any]:
    start_ns, end_ns = _bounds(record)
    at = {"pid": source.number, "ts": (start_ns + source.offset_ns) / 1000}  # microseconds
    match record:
        case Span(name=name, thread=thread, fields=fields, error=error):
            fields = fields if error is None else {**fields, "error": error}
            took = (end_ns - start_ns) / 1000
            return {"ph": "X", "name": name, "tid": thread, **at, "dur": took, "args": fields}
        case Instant(name=name, thread=thread, fields=fields):
            return {"ph": "i", "s": "t", "name": name, "tid": thread, **at, "args": fields}
        case Scalar(name=name, thread=thread, value=None, fields=fields):
            name = f"{name} is not a number"
            return {"ph": "i", "s": "t", "name": name, "tid": thread, **at, "args": fields}
        case Scalar(name=name, thread=thread, value=value):
            # Every key of a counter's arguments is drawn as a curve, so the fields stay behind.
            return {"ph": "C", "name": name, "tid": thread, **at, "args": {"value": value}}
        case Dropped(count=count):
            name = f"{count} events dropped"
            return {"ph": "i", "s": "p", "name": name, "tid": 0, **at, "args": {"count": count}}


_encoder = msgspec.json.Encoder()
