"""Two pages: a plan to train, with memory bars and the pipeline; a plan to serve, with its curve. Draws only."""

from collections.abc import Mapping, Sequence

from cairn.core.units import format_bytes, format_duration
from cairn.plan.published import Compared
from cairn.plan.serve_plan import Option, ServePlan
from cairn.plan.train_cost import Job
from cairn.plan.train_search import Lost, Row, TrainPlan
from cairn.report import plot
from cairn.report.page import Markup, bars, element, facts, heading, join, page, paragraph, table
from cairn.report.plot import Series, chart
from cairn.train.parallel.pipeline import draw
from cairn.train.parallel.pipeline.schedules import schedule
from cairn.train.parallel.pipeline.simulate import Costs, simulate

SHOWN_MICROBATCHES = 16  # of the pipeline's picture

TRAIN_HEADINGS = (
    "layout",
    "tokens/s",
    "MFU",
    "step",
    "memory",
    "bubble",
    "communication",
    "why not",
)
SERVE_HEADINGS = (
    "tp",
    "replicas",
    "GPUs",
    "takes",
    "TTFT p99",
    "TPOT p99",
    "USD/M tokens",
    "J/token",
    "why not",
)


def train_cells(row: Row) -> list[str]:
    exposed = row.time.tensor + row.time.context + row.time.expert + row.time.data
    return [
        row.choice.words(), f"{row.tokens_per_s:,.0f}", f"{row.mfu:.1%}", format_duration(row.seconds),
        format_bytes(row.memory.total()), f"{row.time.bubble / row.seconds:.1%}",
        f"{exposed / row.seconds:.1%}", row.why or "the best",
    ]  # fmt: skip


def serve_cells(option: Option) -> list[str]:
    load = option.load
    if load is None:
        return [str(option.tp), *["-"] * 7, option.why]
    return [
        str(option.tp), str(option.replicas), str(option.gpus), f"{option.most:.1f}/s",
        f"{1e3 * load.ttft_p99:,.0f} ms", f"{1e3 * load.tpot_p99:.1f} ms", f"{option.usd_per_million:.3f}",
        f"{option.joules_per_token:.2f}", option.why or "the best",
    ]  # fmt: skip


def compared_rows(rows: Sequence[Compared]) -> list[list[str]]:
    return [
        [row.what, _short(row.measured), _short(row.predicted), f"{row.error:+.1%}"] for row in rows
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def train_page(
    title: str,
    notes: Sequence[str],
    job: Job,
    plan: TrainPlan,
    cost: Mapping[str, str],
    compared: Mapping[str, Sequence[Compared]],
) -> str:
    parts: list[str] = [
        facts({"GPUs": f"{plan.gpus} x {plan.device.name}", "tokens a step": f"{job.sequence * job.sequences:,}",
               "tried": f"{plan.tried:,}", "fit": f"{plan.fitting:,}", **cost}),
        join(paragraph(note) for note in notes),
    ]  # fmt: skip
    if plan.rows:
        best = plan.rows[0]
        parts += [
            heading("The best ten"),
            table(list(TRAIN_HEADINGS), [train_cells(row) for row in plan.rows]),
            heading(f"Memory of one rank: {best.choice.words()}"),
            bars({name: size / 2**30 for name, size in best.memory.table().items()}, " GiB"),
            heading("Where the step goes"),
            bars({name: seconds for name, seconds in best.time.table().items() if seconds}, " s"),
            *_pipeline(plan.rows),
        ]
    parts += [
        heading("Why the others lost"),
        table(["reason", "how many", "such as"], [_lost(row) for row in plan.lost]),
        *_compared(compared),
    ]  # fmt: skip
    return page(title, *parts, style=plot.STYLE)


def _lost(row: Lost) -> list[str]:
    return [f"{row.kind}: {row.reason}", f"{row.count:,}", row.example]


def _pipeline(rows: Sequence[Row]) -> list[Markup]:
    """The timeline of the first layout that has a pipeline."""
    row = next((row for row in rows if row.choice.layout.pp > 1), None)
    if row is None:
        return [paragraph("None of the best has a pipeline.")]
    found = schedule(row.choice.order, row.choice.layout.pp, SHOWN_MICROBATCHES)
    timeline = simulate(found, Costs())
    return [
        heading(f"Pipeline of {row.choice.words()} (its first {SHOWN_MICROBATCHES} microbatches)"),
        draw.legend(timeline),
        element("div", draw.svg(timeline), class_="scroll"),
    ]


def _compared(compared: Mapping[str, Sequence[Compared]]) -> list[Markup]:
    parts = []
    for name, rows in compared.items():
        if rows:
            parts.append(heading(name))
            parts.append(table(["case", "measured", "predicted", "error"], compared_rows(rows)))
    return parts


def serve_page(
    title: str, notes: Sequence[str], plan: ServePlan, compared: Mapping[str, Sequence[Compared]]
) -> str:
    parts: list[str] = [
        join(paragraph(note) for note in notes),
        heading("Ways to serve it"),
        table(list(SERVE_HEADINGS), [serve_cells(option) for option in plan.options]),
    ]
    if plan.best is not None:
        memory = {name: size / 2**30 for name, size in plan.best.room.table().items()}
        parts += [
            heading("Memory of one GPU"),
            bars(memory, " GiB"),
            heading("Throughput and latency of one replica"),
            element("div", join(_curves(plan)), class_="plots"),
        ]
    parts += _compared(compared)
    return page(title, *parts, style=plot.STYLE)


def _curves(plan: ServePlan) -> list[Markup]:
    loads = plan.curve
    tokens = [load.output_tokens_per_s for load in loads]
    return [
        chart("TTFT over throughput", [
            Series("p50", [(x, 1e3 * load.ttft_p50) for x, load in zip(tokens, loads, strict=True)]),
            Series("p99", [(x, 1e3 * load.ttft_p99) for x, load in zip(tokens, loads, strict=True)]),
        ], x="output tokens/s", y="ms", limit=("SLO", 1e3 * plan.asked.slo_ttft)),
        chart("TPOT over throughput", [
            Series("p50", [(x, 1e3 * load.tpot_p50) for x, load in zip(tokens, loads, strict=True)]),
            Series("p99", [(x, 1e3 * load.tpot_p99) for x, load in zip(tokens, loads, strict=True)]),
        ], x="output tokens/s", y="ms", limit=("SLO", 1e3 * plan.asked.slo_tpot)),
        chart("Throughput over the rate", [
            Series("tokens/s", [(load.rate, load.output_tokens_per_s) for load in loads]),
        ], x="requests/s", y="output tokens/s"),
    ]  # fmt: skip
