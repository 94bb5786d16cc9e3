"""A load test as one HTML file: figures, curves over the load, and for each point what happened when.

    render(report, {0: records, ...}) -> a page that opens from a file, without a network and without a script

A single point is a whole report, too: its distributions and its course over time. Says how everything is defined, and
the command that repeats it. Measures nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from cairn.bench.load_answer import RequestRecord
from cairn.bench.load_row import LoadRow, ServeReport
from cairn.bench.load_stats import Spread, in_flight, steady_window
from cairn.report import plot
from cairn.report.page import (
    Markup,
    element,
    facts,
    heading,
    join,
    notice,
    page,
    paragraph,
    table,
)
from cairn.report.plot import Series, chart

DEFINITIONS = {
    "TTFT": "time to first token: from when a request was due (not from when the client came to send it) to the first "
    "event with tokens",
    "TPOT": "time per output token: from the first to the last event with tokens, divided by one less than the tokens",
    "ITL": "time between one event with tokens and the next, over all requests",
    "E2E": "from when a request was due to the end of its answer",
    "goodput": "requests per second that were answered and kept every limit (SLO)",
    "holds SLO": "p99 of each latency is within its limit, and no request failed",
    "steady": "without the warm-up (found with MSER-5) and without the time after the last arrival",
    "[a, b] and ±": "95%: percentiles by a bootstrap over blocks of neighbouring requests, rates from ten stretches of "
    "time",
}
HEADINGS = (
    "load",
    "requests",
    "failed",
    "req/s",
    "goodput/s",
    "output tok/s",
    "TTFT p50",
    "p90",
    "p99 ms",
    "TPOT p50",
    "p90",
    "p99 ms",
    "E2E p50",
    "p99 ms",
    "holds SLO",
)


RATES = {"requests_per_s": "served", "goodput_per_s": "good", "output_tokens_per_s": "tokens"}


def render(report: ServeReport, records: Mapping[int, Sequence[RequestRecord]]) -> str:
    """`records` are those of the rows of this run, by their place among the rows."""
    rows = report.rows
    body = [
        _head(report),
        *_notices(rows),
        heading("Results"),
        table(HEADINGS, [_cells(row) for row in rows]),
    ]
    if len({row.load for row in rows}) > 1:
        body += [heading("Over the load"), _grid(_sweep(rows))]
    for place, row in enumerate(rows):
        if records.get(place):
            body += _point(row, records[place])
    defined = join(
        join([element("dt", name), element("dd", words)]) for name, words in DEFINITIONS.items()
    )
    body += [heading("Definitions"), element("dl", defined, class_="words")]
    body += [heading("To repeat this"), element("pre", report.command)]
    return page("Serving under load", *body, style=plot.STYLE + STYLE)


def _head(report: ServeReport) -> Markup:
    names = sorted({f"{row.label}: {row.model}" for row in report.rows})
    holding = [row for row in report.rows if row.holds_slo]
    best = max(holding, key=lambda row: row.requests_per_s, default=None)
    known = {
        "server": ", ".join(names),
        "requests": "; ".join(sorted({row.workload or row.dataset for row in report.rows})),
        "client runs on": report.device,
        "date": report.date,
        "commit": report.commit,
    }
    ready = {row.ready_seconds for row in report.rows} - {None}
    if ready:
        known["ready after"] = ", ".join(f"{seconds:.1f} s" for seconds in ready if seconds)
    if best is not None:
        known["most within the limits"] = f"{best.load} ({best.requests_per_s:.2f} req/s)"
    return facts(known)


def _notices(rows: Sequence[LoadRow]) -> list[Markup]:
    found = []
    for row in rows:
        found += [
            notice("bad", f"{row.load}: {count} × {kind}: {row.error_examples.get(kind, '')}")
            for kind, count in row.errors.items()
        ]
        found += [notice("note", f"{row.load}: {note}") for note in row.notes]
    return found


def _cells(row: LoadRow) -> list[str]:
    def triple(spread: Spread | None) -> list[str]:
        if spread is None:
            return ["–"] * 3
        low, high = spread.p99_ci
        return [_ms(spread.p50), _ms(spread.p90), f"{_ms(spread.p99)} [{_ms(low)}, {_ms(high)}]"]

    ttft, tpot, e2e = triple(row.ttft_ms), triple(row.tpot_ms), triple(row.e2e_ms)
    return [
        f"{row.label} {row.load}",
        str(row.requests),
        str(row.requests - row.completed),
        f"{row.requests_per_s:.2f}",
        f"{row.goodput_per_s:.2f}",
        f"{row.output_tokens_per_s:,.1f}",
        *ttft,
        *tpot,
        e2e[0],
        e2e[2],
        {True: "yes", False: "no", None: "–"}[row.holds_slo],
    ]


class _Curves:
    """Rows as curves, one for each label, over what was offered.

    Where that is no number (a trace, all at once), over what was served.
    """

    def __init__(self, rows: Sequence[LoadRow]) -> None:
        self.several = len({(row.label, row.workload) for row in rows}) > len(
            {row.label for row in rows}
        )
        self.rows: dict[str, list[LoadRow]] = {}
        for row in rows:
            self.rows.setdefault(self._name(row), []).append(row)
        self.offered = all(row.rate is not None for row in rows)
        self.closed = all(row.rate is None and row.concurrency is not None for row in rows)

    def x(self) -> str:
        if self.offered:
            return "offered requests/s"
        return "at a time" if self.closed else "served requests/s"

    def quantiles(self, name: str) -> list[Series]:
        shown = ["p50", "p90", "p99"] if len(self.rows) == 1 else ["p50", "p99"]
        return [
            Series(
                self._called(label, quantile),
                [
                    (self._at(row), getattr(spread, quantile))
                    for row in sorted(own, key=self._at)
                    if (spread := getattr(row, name)) is not None
                ],
            )
            for label, own in self.rows.items()
            for quantile in shown
        ]

    def rates(self, name: str) -> list[Series]:
        return [
            Series(
                self._called(label, RATES[name]),
                sorted((self._at(row), getattr(row, name)) for row in own),
            )
            for label, own in self.rows.items()
        ]

    def throughput_by_tpot(self) -> list[Series]:
        return [
            Series(
                label,
                sorted(
                    (row.tpot_ms.p50, row.output_tokens_per_s)
                    for row in own
                    if row.tpot_ms is not None
                ),
            )
            for label, own in self.rows.items()
        ]

    def _name(self, row: LoadRow) -> str:
        return f"{row.label} {row.workload}" if self.several else row.label

    def _called(self, label: str, what: str) -> str:
        return f"{label} {what}" if len(self.rows) > 1 else what

    def _at(self, row: LoadRow) -> float:
        value = row.requests_per_s
        if self.offered or self.closed:
            value = row.rate if self.offered else row.concurrency
        return float(value or 0.0)


def _sweep(rows: Sequence[LoadRow]) -> list[Markup]:
    curves, slo = _Curves(rows), rows[0].slo
    x, ttft, tpot = curves.x(), curves.quantiles("ttft_ms"), curves.quantiles("tpot_ms")
    served = [*curves.rates("requests_per_s"), *curves.rates("goodput_per_s")]
    tokens, trade = curves.rates("output_tokens_per_s"), curves.throughput_by_tpot()
    return [
        chart("Time to first token", ttft, x=x, y="ms", limit=_limit(slo.ttft_s)),
        chart("Time per output token", tpot, x=x, y="ms", limit=_limit(slo.tpot_s)),
        chart("Requests per second", served, x=x, y="1/s"),
        chart("Output tokens per second", tokens, x=x, y="tokens/s"),
        chart("Throughput against speed", trade, x="TPOT p50, ms", y="output tokens/s"),
    ]


def _point(row: LoadRow, records: Sequence[RequestRecord]) -> list[Markup]:
    ordered = sorted(records, key=lambda record: record.due_s)
    good = [record for record in ordered if record.error is None]
    begin_s = ordered[0].due_s
    window = steady_window(ordered)
    shaded = (window.begin_s - begin_s, window.end_s - begin_s)
    levels = [(moment - begin_s, float(level)) for moment, level in in_flight(ordered)]
    first = [(r.due_s - begin_s, r.ttft_s * 1e3) for r in good if r.ttft_s is not None]
    failed = [(r.due_s - begin_s, 0.0) for r in ordered if r.error is not None]
    over_time = [Series("answered", first, "dots", 0)]
    if failed:
        over_time.append(Series("failed", failed, "dots", 4))
    x = "seconds after the start"
    plots = [
        chart(
            "TTFT of each request",
            over_time,
            x=x,
            y="ms",
            limit=_limit(row.slo.ttft_s),
            shaded=shaded,
        ),
        chart("In flight", [Series("requests", levels, "steps")], x=x, y="requests", shaded=shaded),
        _cumulative("TTFT", [r.ttft_s for r in good], row.slo.ttft_s),
        _cumulative("TPOT", [r.tpot_s for r in good], row.slo.tpot_s),
        _cumulative("ITL", [gap for r in good for gap in r.gaps_s], None),
        _cumulative("E2E", [r.e2e_s for r in good], row.slo.e2e_s),
    ]
    steady = row.steady
    requests = _with(steady.requests_per_s, steady.requests_per_s_ci)
    tokens = _with(steady.output_tokens_per_s, steady.output_tokens_per_s_ci)
    words = (
        f"{row.completed} of {row.requests} requests answered in {row.seconds:.1f} s, at most {row.most_in_flight} in "
        f"flight; {row.input_tokens:,} tokens in ({row.cached_tokens:,} from the server's cache), "
        f"{row.output_tokens:,} out. Steady for {steady.seconds:.1f} s (shaded): {requests} requests/s, {tokens} "
        f"output tokens/s. The client used {row.client_cpu:.0%} of a core and sent 99% of the requests at most "
        f"{row.client_late_p99_ms:.1f} ms late."
    )
    return [heading(f"{row.label}, {row.load}"), paragraph(words), _grid(plots)]


def _cumulative(name: str, seconds: Sequence[float | None], limit_s: float | None) -> Markup:
    """Plot of the cumulative distribution of a latency."""
    values = [value * 1e3 for value in seconds if value is not None]
    shares = np.linspace(0, 100, 201 if len(values) > 200 else max(len(values), 2))
    points = (
        list(zip(np.percentile(values, shares).tolist(), shares.tolist(), strict=True))
        if values
        else []
    )
    marked = [Series(name, points, "steps")]
    if limit_s is not None and points and limit_s * 1e3 <= 3 * points[-1][0]:
        marked.append(Series("limit", [(limit_s * 1e3, 0.0), (limit_s * 1e3, 100.0)], "line", 4))
    return chart(f"{name}: share at most this slow", marked, x="ms", y="% of them")


def _grid(plots: Sequence[Markup]) -> Markup:
    return element("div", join(plots), class_="plots")


def _limit(seconds: float | None) -> tuple[str, float] | None:
    return None if seconds is None else ("limit", seconds * 1e3)


def _with(value: float, interval: tuple[float, float] | None) -> str:
    half = f" ± {(interval[1] - interval[0]) / 2:,.2f}" if interval is not None else ""
    return f"{value:,.2f}{half}"


def _ms(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


STYLE = """
pre { white-space: pre-wrap; }
dl.words dt { font-size: .9rem; color: var(--ink); } dl.words dd { margin: 0 0 .4rem; }
"""
