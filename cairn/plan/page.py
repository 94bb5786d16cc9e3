"""Two pages: a plan to train, with memory bars and the pipeline; a plan to serve, with its curve. Draws only."""

from collections.abc import Mapping, Sequence

from cairn.core.units import format_bytes, format_duration
from cairn.plan.memory_bars import STYLE as memory_bars_style
from cairn.plan.memory_bars import memory_bars
from cairn.plan.published import Compared
from cairn.plan.serve_load import UNUSED
from cairn.plan.serve_plan import Option, ServePlan
from cairn.plan.train_cost import Job, timeline
from cairn.plan.train_search import Lost, Row, TrainPlan
from cairn.report import plot
from cairn.report.page import Markup, bars, element, facts, heading, join, page, paragraph, table
from cairn.report.plot import Series, chart
from cairn.train.memory import OF_DEVICE
from cairn.train.parallel.pipeline import draw

SHOWN_MICROBATCHES = 16  # of the pipeline's picture

TRAIN_HEADINGS = (
    "layout",
    "tokens/s",
    "MFU",
    "step",
    "memory",
    "bubble",
    "communication",
    "verdict",
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
    "verdict",
)


def train_cells(row: Row) -> list[str]:
    time = row.time
    exposed = time.tensor + time.context + time.expert + time.stages + time.data
    return [
        row.choice.words(),
        f"{row.tokens_per_s:,.0f}",
        f"{row.mfu:.1%}",
        format_duration(row.seconds),
        format_bytes(row.memory.total()),
        f"{row.time.bubble / row.seconds:.1%}",
        f"{exposed / row.seconds:.1%}",
        row.why or "best",
    ]


def serve_cells(option: Option) -> list[str]:
    load = option.load
    if load is None:
        return [str(option.tp), *["-"] * 7, option.why]
    return [
        str(option.tp),
        str(option.replicas),
        str(option.gpus),
        f"{option.most:.1f}/s",
        f"{1e3 * load.ttft_p99:,.0f} ms",
        f"{1e3 * load.tpot_p99:.1f} ms",
        f"{option.usd_per_million:.3f}",
        f"{option.joules_per_token:.2f}",
        option.why or "best",
    ]


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
        facts(
            {
                "GPUs": f"{plan.gpus} x {plan.device.name}",
                "tokens a step": f"{job.sequence * job.sequences:,}",
                "tried": f"{plan.tried:,}",
                "fit": f"{plan.fitting:,}",
                **cost,
            }
        ),
        join(paragraph(note) for note in notes),
    ]
    if plan.rows:
        best = plan.rows[0]
        parts += [
            heading("The best ten"),
            _with_words(TRAIN_HEADINGS, [train_cells(row) for row in plan.rows], "words named"),
            paragraph("To run the first: ", element("code", f"cairn train RECIPE {best.flags}")),
            heading("Memory of one rank"),
            paragraph(
                f"At the peak of a step; the line is the {OF_DEVICE:.0%} that a run may plan with."
            ),
            memory_bars(
                {row.choice.words(): row.memory.table() for row in plan.rows},
                plan.device.memory_bytes,
                OF_DEVICE,
            ),
            heading(f"Where the step goes: {best.choice.words()}"),
            bars({name: seconds for name, seconds in best.time.table().items() if seconds}, " s"),
            *_pipeline(job, plan.pipelined),
        ]
    parts += [
        heading("Why the others lost"),
        _with_words(
            ["reason", "how many", "such as"], [_lost(row) for row in plan.lost], "words named"
        ),
        *_compared(compared),
    ]
    return page(title, *parts, style=plot.STYLE + memory_bars_style + STYLE)


def _with_words(
    headings: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "words"
) -> Markup:
    """A table whose last column is a sentence; `words named`: its first is long, too."""
    return element("div", table(list(headings), rows), class_=kind)


def _lost(row: Lost) -> list[str]:
    return [f"{row.kind}: {row.reason}", f"{row.count:,}", row.example]


def _pipeline(job: Job, row: Row | None) -> list[Markup]:
    """The timeline of the best layout that has a pipeline, wherever it came."""
    if row is None:
        return [heading("Pipeline"), paragraph("Nothing that fits has a pipeline.")]
    choice = row.choice
    microbatches = job.sequences // (choice.layout.data_ranks() * choice.microbatch)
    shown_microbatches = min(microbatches, max(SHOWN_MICROBATCHES, 2 * choice.layout.pp))
    shown_microbatches -= (
        shown_microbatches % choice.layout.pp if choice.order == "interleaved" else 0
    )  # in rounds
    run = timeline(choice.order, choice.layout.pp, shown_microbatches, choice.chunks)
    first = f"its {microbatches:,}"
    if shown_microbatches < microbatches:
        first = f"its first {shown_microbatches} of {microbatches:,}"
    return [
        heading(f"Pipeline of {choice.words()}"),
        paragraph(
            f"{(row.why or 'the best').capitalize()}. Here with {first} microbatches; a step's bubble is "
            f"{row.time.bubble / row.seconds:.1%}."
        ),
        draw.legend(run),
        draw.svg(run),
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
        _with_words(SERVE_HEADINGS, [serve_cells(option) for option in plan.options]),
        heading("Memory of one GPU"),
        memory_bars(_memory(plan.options), plan.device.memory_bytes),
    ]
    if plan.best is not None:
        parts += [
            heading("Throughput and latency of one replica"),
            element("div", join(_curves(plan)), class_="plots"),
        ]
    parts += _compared(compared)
    return page(title, *parts, style=plot.STYLE + memory_bars_style + STYLE)


def _memory(options: Sequence[Option]) -> dict[str, dict[str, int]]:
    """Memory by tensor-parallel size, without the unused part."""
    return {
        f"tp {option.tp}": {
            name: size for name, size in option.room.table().items() if name != UNUSED
        }
        for option in options
    }


def _curves(plan: ServePlan) -> list[Markup]:
    loads = plan.curve
    tokens = [load.output_tokens_per_s for load in loads]
    return [
        chart(
            "TTFT over throughput",
            [
                Series(
                    "p50", [(x, 1e3 * load.ttft_p50) for x, load in zip(tokens, loads, strict=True)]
                ),
                Series(
                    "p99", [(x, 1e3 * load.ttft_p99) for x, load in zip(tokens, loads, strict=True)]
                ),
            ],
            x="output tokens/s",
            y="ms",
            limit=("SLO", 1e3 * plan.demand.slo_ttft),
        ),
        chart(
            "TPOT over throughput",
            [
                Series(
                    "p50", [(x, 1e3 * load.tpot_p50) for x, load in zip(tokens, loads, strict=True)]
                ),
                Series(
                    "p99", [(x, 1e3 * load.tpot_p99) for x, load in zip(tokens, loads, strict=True)]
                ),
            ],
            x="output tokens/s",
            y="ms",
            limit=("SLO", 1e3 * plan.demand.slo_tpot),
        ),
        chart(
            "Throughput over the rate",
            [
                Series("tokens/s", [(load.rate, load.output_tokens_per_s) for load in loads]),
            ],
            x="requests/s",
            y="output tokens/s",
        ),
    ]


STYLE = """
.words th:last-child, .words td:last-child { text-align: left; white-space: normal; min-width: 13rem; }
.named td:first-child { white-space: normal; min-width: 13rem; }
"""
