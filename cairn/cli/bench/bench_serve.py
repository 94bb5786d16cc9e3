"""`cairn bench serve`: load on a running server, ours or any that speaks OpenAI's API. Measures nothing itself."""

import asyncio
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cairn.cli.bench.load_options import BenchServe, check, read_setup, serve_args
from cairn.core.config import load
from cairn.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cairn.bench.load_answer import RequestRecord
    from cairn.bench.load_row import LoadRow, ServeReport
    from cairn.bench.load_search import Tried
    from cairn.bench.load_setup import LoadLevel, LoadSetup
    from cairn.bench.serve_bench import LoadProgress

    Finished = Callable[[LoadRow, list[RequestRecord]], None]
    Next = Callable[[list[LoadRow]], LoadLevel | None]  # what to measure, after these

FIRST_RUN = 1000  # its place in a sweep: no other point has its prompts


def run(args: list[str]) -> int:
    options = load(BenchServe, args=args, env_prefix="CAIRN_BENCH_SERVE_").value
    check(options)
    from cairn.bench.load_row import read, report
    from cairn.bench.record import origin, repeatable, require_commit, write
    from cairn.cli.bench.load_table import line, table

    setup, loads = read_setup(options)
    for path in (options.html, options.records, options.out):
        _require_writable(path)
    if options.out is not None:
        require_commit(options.commit)
    old = read(options.out) if options.merge and options.out and options.out.exists() else None
    command = repeatable(["bench", "serve"], _without(args, "--html", "--records"))
    source = origin(command, _machine(), options.commit)
    rows: list[LoadRow] = []
    measured: list[list[RequestRecord]] = []

    def finished(row: "LoadRow", records: "list[RequestRecord]") -> None:
        rows.append(row)
        measured.append(records)
        _log_line(line(row), options)
        if options.out is not None:
            write(report(source, rows, old), options.out)

    _allow_many_connections()
    _measure(options, setup, _order(options, loads), finished)
    document = report(source, rows, old)
    if options.records is not None:
        _write_records(options.records, rows, measured)
    if options.html is not None:
        _write_page(options.html, document, measured)
        _log_line(f"report: {options.html}", options)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    ordered = sorted(rows, key=lambda row: row.rate or 0) if options.find_rate else rows
    _log_line("\n" + table(ordered), options)
    if options.find_rate:
        _log_line(_found(rows), options)
    return 1 if any(row.completed == 0 for row in rows) else 0


def _order(options: BenchServe, loads: "list[LoadLevel]") -> "Next":
    """The loads one after the other; or, in a search, what the last verdicts make worth trying."""
    if not options.find_rate:
        return lambda rows: loads[len(rows)] if len(rows) < len(loads) else None
    from cairn.bench.load_search import next_rate
    from cairn.bench.load_setup import LoadLevel

    low, high = options.rate[0], options.rate[1] if len(options.rate) == 2 else None

    def search(rows: "list[LoadRow]") -> "LoadLevel | None":
        rate = next_rate(_tried(rows), low, high, options.resolution)
        return None if rate is None else LoadLevel(rate=rate)

    return search


def _measure(options: BenchServe, setup: "LoadSetup", order: "Next", finished: "Finished") -> None:
    """Against --url, or against a server that lives as long as this takes."""
    from cairn.bench.own_server import started

    with ExitStack() as stack:
        if options.start is not None:
            served = stack.enter_context(
                started(serve_args(options), lambda text: print(text, file=sys.stderr, flush=True))
            )
            target = msgspec.structs.replace(setup.target, url=served.url)
            setup = msgspec.structs.replace(setup, target=target)
            plain, ready = finished, served.ready_s

            def finished(row: "LoadRow", records: "list[RequestRecord]") -> None:
                plain(
                    msgspec.structs.replace(row, server=options.start, ready_seconds=ready), records
                )

        asyncio.run(_sweep(setup, order, finished, options.cold))


async def _sweep(setup: "LoadSetup", order: "Next", finished: "Finished", cold: bool) -> None:
    from cairn.bench.load_client import LoadClient
    from cairn.bench.serve_bench import (
        find_model,
        find_vocabulary,
        measure,
        warm_up,
        warm_up_under,
    )
    from cairn.cli.bench.load_progress import line
    from cairn.report.progress import StatusLine

    async with LoadClient(setup.target) as client:
        model = setup.target.model or await find_model(client)
        vocab = min(setup.vocab, await find_vocabulary(client) or setup.vocab)
    target = msgspec.structs.replace(setup.target, model=model)
    setup = msgspec.structs.replace(setup, target=target, vocab=vocab)
    status = StatusLine()
    rows: list[LoadRow] = []

    def watch(progress: "LoadProgress") -> None:
        if status.shown:
            status.show(line(progress))

    async with LoadClient(setup.target) as client:
        if cold and (one := order(rows)) is not None:
            row, records = await measure(client, setup, one, FIRST_RUN, watch)
            status.clear()
            finished(msgspec.structs.replace(row, load=f"{row.load}, first run"), records)
        await warm_up(client, setup)
        while (one := order(rows)) is not None:
            try:
                if not rows:
                    await warm_up_under(client, setup, one, watch)
                row, records = await measure(client, setup, one, len(rows), watch)
            finally:
                status.clear()
            rows.append(row)
            finished(row, records)


def _tried(rows: "list[LoadRow]") -> "list[Tried]":
    from cairn.bench.load_search import Tried

    return [Tried(row.rate, bool(row.holds_slo)) for row in rows if row.rate is not None]


def _found(rows: "list[LoadRow]") -> str:
    from cairn.bench.load_search import verdict

    return verdict(_tried(rows))


def _require_writable(path: Path | None) -> None:
    """Refuse before the measurement, and not after it."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}", hint="is there such a folder, and is it yours?")


def _allow_many_connections() -> None:
    """Each request in flight is a file: as many as this user may open, not as many as a shell says."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _machine() -> str:
    """Machine of the client, and of a server on loopback."""
    from cairn.hw.gpus import read_gpus
    from cairn.hw.host import read_cpu

    gpus, _ = read_gpus(Path("/"))
    return gpus[0].name if gpus else read_cpu(Path("/")).model or "an unknown processor"


def _without(args: list[str], *names: str) -> list[str]:
    """Remove arguments that only determine the location of the result."""
    kept = []
    skip = False
    for argument in args:
        if not skip and argument.partition("=")[0] not in names:
            kept.append(argument)
        skip = argument in names
    return kept


def _write_page(path: Path, document: "ServeReport", measured: "list[list[RequestRecord]]") -> None:
    from cairn.bench.load_report import render

    ahead = len(document.rows) - len(measured)  # rows of the old file
    page = render(document, {ahead + at: records for at, records in enumerate(measured)})
    path.write_text(page, encoding="utf-8")


def _write_records(
    path: Path, rows: "list[LoadRow]", measured: "list[list[RequestRecord]]"
) -> None:
    """Times are seconds after the first request of the point."""
    from cairn.bench.load_answer import since

    with path.open("wb") as file:
        for row, records in zip(rows, measured, strict=True):
            ordered = sorted(records, key=lambda record: record.due_s)
            for record in ordered:
                moved = msgspec.to_builtins(since(record, ordered[0].due_s))
                file.write(
                    msgspec.json.encode({"label": row.label, "load": row.load, **moved}) + b"\n"
                )


def _log_line(text: str, options: BenchServe) -> None:
    print(text, file=sys.stderr if options.json else sys.stdout, flush=True)
