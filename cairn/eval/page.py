"""The scores of a model as a page that opens without a network: a table of metrics, and what the model answered."""

from pathlib import Path

from cairn.core.units import format_duration
from cairn.eval.run import Evaluation, TaskResult
from cairn.report.page import Markup, element, facts, heading, join, page, paragraph, table

SHOWN = 20  # documents of each task
STYLE = "details { margin: .4rem 0; } pre { white-space: pre-wrap; }"


def write_page(evaluation: Evaluation, command: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(evaluation, command), encoding="utf-8")


def render(evaluation: Evaluation, command: str) -> str:
    parts = [
        facts({"model": evaluation.model, "tasks": str(len(evaluation.tasks))}),
        paragraph("Made with ", element("code", command), "; intervals are 95%."),
        *(_task(result) for result in evaluation.tasks),
    ]
    return page(f"Scores of {evaluation.model}", *parts, style=STYLE)


def _task(result: TaskResult) -> Markup:
    rows = [[name, metric.shown(), metric.interval()] for name, metric in result.metrics.items()]
    shown = result.samples[:SHOWN]
    about = f"{result.documents} documents in {format_duration(result.seconds)}"
    return join(
        [
            heading(result.task),
            paragraph(about),
            table(["metric", "value", "interval"], rows),
            join(_sample(at, result) for at in range(len(shown))),
        ]
    )


def _sample(at: int, result: TaskResult) -> Markup:
    sample = result.samples[at]
    scores = ", ".join(f"{name} {value:g}" for name, value in sample.scores.items())
    parts = [("prompt", sample.prompt), ("answer", sample.answer), ("expected", sample.expected)]
    inner = (join([paragraph(name), element("pre", text)]) for name, text in parts if text)
    return element("details", element("summary", f"document {at}: {scores}"), join(inner))
