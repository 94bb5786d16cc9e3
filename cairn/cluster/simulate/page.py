"""Self-contained page that compares policies on a trace."""

from collections.abc import Sequence

from cairn.cluster.simulate.explain import refusals
from cairn.cluster.simulate.history import ReplayHistory
from cairn.cluster.simulate.packing import PUBLISHED, PackingRun
from cairn.cluster.simulate.summary import ReplaySummary
from cairn.core.units import format_duration
from cairn.report import plot
from cairn.report.page import Markup, bars, element, facts, heading, join, page, paragraph, table
from cairn.report.plot import Series, chart, thin

HEADINGS = (
    "policy",
    "mean wait",
    "p99 wait",
    "mean JCT",
    "slowdown",
    "used",
    "stranded GPU-h",
    "fairness",
    "preempted",
    "resized",
    "lost GPU-h",
    "rejected",
    "deadlines met",
    "spread gangs",
)


def cells(summary: ReplaySummary) -> list[str]:
    met = "-" if summary.deadlines_met is None else f"{summary.deadlines_met:.1%}"
    return [
        summary.policy,
        _time(summary.wait_mean),
        _time(summary.wait_p99),
        _time(summary.jct_mean),
        f"{summary.slowdown_mean:.2f}",
        f"{summary.utilisation:.1%}",
        f"{summary.stranded_gpu_hours:,.0f}",
        f"{summary.fairness:.3f}",
        f"{summary.preempted:,}",
        f"{summary.resized:,}",
        f"{summary.lost_gpu_hours:,.0f}",
        f"{summary.rejected:,}",
        met,
        f"{summary.spread_gangs:.1%}",
    ]


def _time(seconds: float) -> str:
    return format_duration(round(seconds, 1)) if seconds >= 0.05 else "0 s"


def compare_page(
    title: str,
    notes: Sequence[str],
    histories: Sequence[ReplayHistory],
    summaries: Sequence[ReplaySummary],
) -> str:
    cluster = histories[0].cluster
    parts = [
        facts(
            {
                "cluster": cluster.words(),
                "GPUs": f"{cluster.total:,}",
                "jobs": f"{summaries[0].jobs:,}",
            }
        ),
        join(paragraph(note) for note in notes),
        heading("Policies"),
        table(list(HEADINGS), [cells(summary) for summary in summaries]),
        heading("Mean wait, minutes"),
        bars({summary.policy: summary.wait_mean / 60 for summary in summaries}),
        heading("Over time"),
        element("div", join(_charts(histories)), class_="plots"),
        *_rejected(histories),
        *_why(histories),
    ]
    return page(title, *parts, style=plot.STYLE)


def _charts(histories: Sequence[ReplayHistory]) -> list[Markup]:
    def series(name: str) -> list[Series]:
        return [Series(history.policy, _over_time(history, name), "steps") for history in histories]

    waits = [
        Series(
            history.policy,
            _distribution(
                [
                    story.first_start - story.job.submit
                    for story in history.stories.values()
                    if story.first_start is not None
                ]
            ),
        )
        for history in histories
    ]
    return [
        chart(
            "GPUs in use",
            series("busy"),
            x="hours",
            y="GPUs",
            limit=("all", float(histories[0].cluster.total)),
        ),
        chart("Jobs that wait", series("waiting"), x="hours", y="jobs"),
        chart("How long jobs wait", waits, x="share of jobs, %", y="hours"),
    ]


def _over_time(history: ReplayHistory, name: str) -> Sequence[tuple[float, float]]:
    return thin([(sample.at / 3600, getattr(sample, name)) for sample in history.samples], 600)


def _distribution(waits: list[float]) -> list[tuple[float, float]]:
    waits.sort()
    last = len(waits) - 1
    return (
        [(100 * place / 100, waits[last * place // 100] / 3600) for place in range(101)]
        if waits
        else []
    )


def _rejected(histories: Sequence[ReplayHistory]) -> list[Markup]:
    """The first of those that each policy rejected."""
    parts: list[Markup] = []
    for history in histories:
        refused = refusals(history)
        if refused:
            parts.append(heading(f"Rejected by {history.policy}: {len(refused):,}"))
            rows = [[str(identity), why] for identity, why in refused[:20]]
            parts.append(table(["job", "reason"], rows))
            if len(refused) > len(rows):
                parts.append(paragraph(f"and {len(refused) - len(rows):,} more; --json has all"))
    return parts


def _why(histories: Sequence[ReplayHistory]) -> list[Markup]:
    parts: list[Markup] = []
    for history in histories:
        if history.reasons:
            parts.append(heading(f"Why it waited: {history.policy}"))
            rows = [[why, format_duration(at)] for at, why in history.reasons[:200]]
            parts.append(table(["reason", "from"], rows))
    return parts


def packing_page(title: str, notes: Sequence[str], runs: Sequence[PackingRun]) -> str:
    names = list(dict.fromkeys(run.policy for run in runs))
    rows = [[name, *packing_cells(name, runs)] for name in names]
    series = [
        Series(name, [(100 * a, 100 * b) for a, b in _first(runs, name).curve]) for name in names
    ]
    return page(
        title,
        join(paragraph(note) for note in notes),
        heading("GPUs allocated when all of them have been asked for"),
        table(["policy", "allocated", "published", "difference", "turned away"], rows),
        element(
            "div",
            chart("Allocation", series, x="demand arrived, %", y="allocated, %"),
            class_="plots",
        ),
        style=plot.STYLE,
    )


def packing_cells(name: str, runs: Sequence[PackingRun]) -> list[str]:
    chosen = [run for run in runs if run.policy == name]
    mean = 100 * sum(run.allocated for run in chosen) / len(chosen)
    away = sum(run.turned_away for run in chosen) / len(chosen)
    published = PUBLISHED[name]
    return [f"{mean:.2f}%", f"{published:.2f}%", f"{mean - published:+.2f}", f"{away:,.0f}"]


def _first(runs: Sequence[PackingRun], name: str) -> PackingRun:
    return next(run for run in runs if run.policy == name)
