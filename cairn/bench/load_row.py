"""Row of a load test: computed from records, stored in a file.

    Record, Record, ... --summarize--> Row --report--> ServeReport {command, commit, date, device, versions, rows}

Rates are over the whole run, from the first request that was due to the last answer; `steady` has them without the
warm-up and the end. Pure but for `read`.
"""

import math
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from cairn.bench import load_stats, record
from cairn.bench.load_answer import RequestRecord
from cairn.bench.load_setup import LoadLevel, LoadSetup, describe, workload
from cairn.bench.load_stats import Interval, LatencySlo, Spread
from cairn.bench.record import RecordOrigin, all_commands, not_again

RANDOM = "random:"
BUSY_CLIENT = 0.7  # of a core; above it the client may be what is measured
LATE_CLIENT_S = 0.05


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """Between the warm-up and the last arrival; rates with the interval of 95%."""

    begin_s: float  # after the first request
    seconds: float
    requests_per_s: float
    requests_per_s_ci: Interval | None
    output_tokens_per_s: float
    output_tokens_per_s_ci: Interval | None
    ttft_ms: Spread | None  # of the requests that were due in it
    tpot_ms: Spread | None


class LoadRow(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one load: latencies in milliseconds, of the successful requests."""

    label: str
    model: str
    shape: str = ""  # of the model, where its weights are random
    workload: str = ""  # what was asked, in words
    load: str  # how fast, in words
    rate: float | None
    concurrency: int | None
    dataset: str
    requests: int
    completed: int
    errors: dict[str, int]
    error_examples: dict[str, str]
    seconds: float  # first request due to last answer
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    slo: LatencySlo
    good: int
    goodput_per_s: float
    holds_slo: bool | None  # p99 of each within its limit and no errors; None without limits
    steady: Steady
    most_in_flight: int
    client_late_p99_ms: float
    client_cpu: float  # of one core
    notes: list[str]
    server: str = ""  # arguments of `cairn serve`, where this run started it
    ready_seconds: float | None = None  # from the start of that server to its first healthy answer
    commit: str = ""
    date: str = ""


class ServeReport(RecordOrigin, frozen=True, kw_only=True):
    """benchmarks/h200/serve.json"""

    rows: list[LoadRow]


def summarize(
    setup: LoadSetup, load: LoadLevel, records: list[RequestRecord], cpu: float
) -> LoadRow:
    """Pure: from records to figures."""
    ordered = sorted(records, key=lambda record: record.due_s)
    good = [record for record in ordered if record.error is None]
    window = load_stats.whole_window(ordered)
    read = sum(record.input_tokens or 0 for record in good)
    written = sum(record.output_tokens for record in ordered)
    kept = sum(load_stats.is_good(record, setup.slo) for record in ordered)
    ttft, tpot = _ttft(good), _tpot(good)
    late_s = sorted(record.sent_s - record.due_s for record in ordered)[
        int(0.99 * (len(ordered) - 1))
    ]
    seconds = max(window.seconds, 1e-9)
    return LoadRow(
        label=setup.label,
        model=setup.target.model,
        shape=_shape(setup.target.model),
        workload=workload(setup),
        load=describe(load, setup),
        rate=None if load.rate == math.inf else load.rate,
        concurrency=load.concurrency if load.concurrency is not None else setup.limit,
        dataset=setup.dataset,
        requests=len(ordered),
        completed=len(good),
        errors=load_stats.errors(ordered),
        error_examples={r.error: r.detail or "" for r in reversed(ordered) if r.error is not None},
        seconds=window.seconds,
        input_tokens=read,
        cached_tokens=sum(record.cached_tokens or 0 for record in good),
        output_tokens=written,
        requests_per_s=len(good) / seconds,
        input_tokens_per_s=read / seconds,
        output_tokens_per_s=written / seconds,
        ttft_ms=ttft,
        tpot_ms=tpot,
        itl_ms=_spread_ms(gap for record in good for gap in record.gaps_s),
        e2e_ms=_spread_ms(record.e2e_s for record in good),
        slo=setup.slo,
        good=kept,
        goodput_per_s=kept / seconds,
        holds_slo=_holds(setup.slo, ordered, good),
        steady=_steady(ordered, good),
        most_in_flight=max(level for _, level in load_stats.in_flight(ordered)),
        client_late_p99_ms=late_s * 1e3,
        client_cpu=cpu,
        notes=_notes(setup, good, late_s, cpu),
    )


def report(
    origin: RecordOrigin, rows: list[LoadRow], old: ServeReport | None = None
) -> ServeReport:
    """The new rows, and of an old report those that were not measured again."""
    kept = not_again(old.rows, rows, _key) if old is not None else []
    dated = [msgspec.structs.replace(row, commit=origin.commit, date=origin.date) for row in rows]
    return ServeReport(
        command=all_commands(old.command if old is not None and kept else None, origin.command),
        commit=origin.commit,
        date=origin.date,
        device=origin.device,
        versions=origin.versions,
        rows=[*kept, *dated],
    )


def read(path: Path) -> ServeReport:
    return record.read(path, ServeReport, "serve")


def _key(row: LoadRow) -> tuple[str, ...]:
    return row.label, row.model, row.workload or row.dataset, row.load


def _shape(model: str) -> str:
    """`random:qwen3-8b` is how our own server calls that shape."""
    return model.removeprefix(RANDOM) if model.startswith(RANDOM) else ""


def _ttft(good: list[RequestRecord]) -> Spread | None:
    return _spread_ms(record.ttft_s for record in good)


def _tpot(good: list[RequestRecord]) -> Spread | None:
    return _spread_ms(record.tpot_s for record in good)


def _spread_ms(seconds: Iterable[float | None]) -> Spread | None:
    return load_stats.spread([value * 1e3 for value in seconds if value is not None])


def _steady(ordered: list[RequestRecord], good: list[RequestRecord]) -> Steady:
    window = load_stats.steady_window(ordered)
    inside = [record for record in good if window.begin_s <= record.due_s <= window.end_s]
    ends = np.array([record.end_s for record in good])
    requests, requests_ci = load_stats.rate_within(ends, np.ones(len(ends)), window)
    tokens, tokens_ci = load_stats.rate_within(*load_stats.token_times(ordered), window)
    return Steady(
        begin_s=window.begin_s - ordered[0].due_s,
        seconds=window.seconds,
        requests_per_s=requests,
        requests_per_s_ci=requests_ci,
        output_tokens_per_s=tokens,
        output_tokens_per_s_ci=tokens_ci,
        ttft_ms=_ttft(inside),
        tpot_ms=_tpot(inside),
    )


def _holds(slo: LatencySlo, ordered: list[RequestRecord], good: list[RequestRecord]) -> bool | None:
    """The promise as it is mostly made: 99 of 100 requests within each limit, and none lost."""
    limits = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "e2e_s": slo.e2e_s}
    if all(limit is None for limit in limits.values()):
        return None
    if len(good) < len(ordered):
        return False
    for name, limit in limits.items():
        values = [value for r in good if (value := getattr(r, name)) is not None]
        if limit is not None and values and np.percentile(values, 99) > limit:
            return False
    return True


def _notes(setup: LoadSetup, good: list[RequestRecord], late_s: float, cpu: float) -> list[str]:
    notes = []
    if cpu > BUSY_CLIENT:
        notes.append(f"the client used {cpu:.0%} of a core: it may be what was measured")
    if late_s > LATE_CLIENT_S and setup.limit is None:
        notes.append(f"the client sent 1% of the requests more than {late_s * 1e3:.0f} ms late")
    if good and len(good) < 100:
        notes.append(f"the p99 of {len(good)} requests is nearly their slowest")
    short = sum(record.output_tokens < record.asked_tokens for record in good)
    if short and setup.target.ignore_eos:
        notes.append(f"{short} answers are shorter than asked: the server may not know ignore_eos")
    if good and all(record.input_tokens is None for record in good):
        notes.append("the server sends no usage: events were counted as tokens, inputs are unknown")
    return notes
