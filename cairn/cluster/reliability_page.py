"""The page about failures: ETTR over the size of the job, where the time goes, and the checks. Draws only."""

from collections.abc import Mapping, Sequence

from cairn.cluster.reliability import Outlook
from cairn.cluster.reliability_monte_carlo import Lived
from cairn.cluster.reliability_published import Checked
from cairn.core.units import format_duration
from cairn.report import plot
from cairn.report.page import Markup, bars, element, facts, heading, join, page, paragraph, table
from cairn.report.plot import Series, chart

HEADINGS = (
    "scheme",
    "checkpoint every",
    "ETTR",
    "Monte Carlo",
    "goodput GPUs",
    "checkpoint",
    "detect",
    "restart",
    "lost work",
)


def cells(outlook: Outlook, lived: Lived) -> list[str]:
    return [
        outlook.scheme,
        format_duration(outlook.interval),
        f"{outlook.ettr:.4f}",
        f"{lived.ettr:.4f} ± {lived.error:.4f}",
        f"{outlook.goodput_gpus:,.0f}",
        *(f"{share:.2%}" for share in outlook.lost.values()),
    ]


def render(
    gpus: int,
    rate: str,
    now: Sequence[tuple[Outlook, Lived]],
    sweep: Mapping[str, Sequence[Outlook]],
    checked: Sequence[Checked],
    expected: Mapping[str, float],
) -> str:
    first = now[0][0]
    return page(
        f"Failures of {gpus:,} GPUs",
        facts(
            {
                "GPUs": f"{gpus:,}",
                "failure rate": rate,
                "MTTF": format_duration(first.mttf),
                "failures a day": f"{first.failures_per_day:.1f}",
            }
        ),
        heading("How much of the time is training"),
        table(list(HEADINGS), [cells(outlook, lived) for outlook, lived in now]),
        paragraph(
            "ETTR is exact for failures without memory; the Monte Carlo beside it draws them one by one."
        ),
        element("div", join(_by_size(sweep)), class_="plots"),
        heading("Where the time goes, %"),
        *(
            element(
                "div",
                heading(outlook.scheme, 3),
                bars({k: 100 * v for k, v in outlook.lost.items()}, "%"),
            )
            for outlook, _ in now
        ),
        heading("Published beside predicted"),
        _published(checked),
        heading("Interruptions to expect in 30 days, by cause (Llama 3's mix)"),
        bars({cause: count for cause, count in expected.items() if count >= 0.5}),
        style=plot.STYLE,
    )


def _by_size(sweep: Mapping[str, Sequence[Outlook]]) -> list[Markup]:
    training = [
        Series(name, [(row.gpus / 1000, 100 * row.ettr) for row in rows])
        for name, rows in sweep.items()
    ]
    worth = [
        Series(name, [(row.gpus / 1000, row.goodput_gpus / 1000) for row in rows])
        for name, rows in sweep.items()
    ]
    mean = [(row.gpus / 1000, row.mttf / 3600) for row in next(iter(sweep.values()))]
    x = "thousand GPUs"
    return [
        chart("ETTR over the size of the job", training, x=x, y="%"),
        chart("Goodput", worth, x=x, y="thousand GPUs that train"),
        chart("Time between failures", [Series("MTTF", mean)], x=x, y="hours"),
    ]


def _published(checked: Sequence[Checked]) -> Markup:
    rows = [
        [
            row.what,
            f"{row.published:g} {row.unit}",
            f"{row.predicted:.3g} {row.unit}",
            f"{row.error:+.1%}",
            row.note,
        ]
        for row in checked
    ]
    return table(["what", "published", "predicted", "error", "note"], rows)
