"""A load test on a terminal: a line after each point, a table at the end. Latencies in milliseconds."""

from cairn.bench.load_row import LoadRow
from cairn.bench.load_stats import Spread
from cairn.cli.columns import lines

HEADINGS = ("load", "ok", "failed", "req/s", "good/s", "out tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p50",
            "p99", "SLO")  # fmt: skip


def line(row: LoadRow) -> str:
    failed = row.requests - row.completed
    trouble = (
        f", {failed} FAILED ({', '.join(f'{n} {k}' for k, n in row.errors.items())})"
        if failed
        else ""
    )
    notes = f" ({'; '.join(row.notes)})" if row.notes else ""
    return (
        f"{row.label} {row.load}: {row.completed} answered{trouble}, {row.requests_per_s:.2f} requests/s, "
        f"{row.output_tokens_per_s:,.1f} output tokens/s{notes}"
    )


def table(rows: list[LoadRow]) -> str:
    """Columns under their headings; latencies in milliseconds."""
    return "\n".join(lines(HEADINGS, [_cells(row) for row in rows], left=[0]))


def _cells(row: LoadRow) -> tuple[str, ...]:
    def pair(spread: Spread | None) -> tuple[str, str]:
        return ("-", "-") if spread is None else (f"{spread.p50:.1f}", f"{spread.p99:.1f}")

    return (
        row.load,
        str(row.completed),
        str(row.requests - row.completed),
        f"{row.requests_per_s:.2f}",
        f"{row.goodput_per_s:.2f}",
        f"{row.output_tokens_per_s:,.1f}",
        *pair(row.ttft_ms),
        *pair(row.tpot_ms),
        *pair(row.e2e_ms),
        {True: "holds", False: "broken", None: "-"}[row.holds_slo],
    )
