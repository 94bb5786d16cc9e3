"""The page at the end of a run: what was trained, how the loss fell, how fast it went. Opens without a network."""

from collections.abc import Sequence
from pathlib import Path

from cairn.core.config import to_toml
from cairn.core.job_ledger import JobIncident
from cairn.core.job_ledger_files import read_ledger
from cairn.core.units import format_bytes, format_count, format_duration
from cairn.models.spec import ModelSpec
from cairn.report import plot
from cairn.report.page import Markup, element, facts, heading, join, page, paragraph, table
from cairn.report.plot import Series, chart
from cairn.train.config import Train
from cairn.train.memory import Memory
from cairn.train.metrics_log import HeldOut, Record, read_held_out, read_log, smoothed

MEMORY_OF_ALL = "Memory, predicted for one process: the layout divides it"


def write_report(config: Train, spec: ModelSpec, memory: Memory, notes: list[str]) -> Path:
    records, held_out = read_log(config.folder), read_held_out(config.folder)
    path = config.folder / "report.html"
    fresh = path.with_name(".report.html")
    fresh.write_text(render(config, spec, memory, notes, records, held_out), encoding="utf-8")
    fresh.replace(path)
    return path


def render(
    config: Train,
    spec: ModelSpec,
    memory: Memory,
    notes: list[str],
    records: list[Record],
    held_out: Sequence[HeldOut] = (),
) -> str:
    parts = [
        facts(_facts(config, spec, records, held_out)),
        join(paragraph(note) for note in notes),
        heading("Curves"),
        element("div", join(_charts(records, held_out)), class_="plots"),
        heading("Memory, predicted" if config.parallel.world() == 1 else MEMORY_OF_ALL),
        table(
            ["part", "bytes"],
            [[name, format_bytes(size)] for name, size in memory.table().items()]
            + [["together", format_bytes(memory.total())]],
        ),
        *_texts(held_out),
        *_bad_steps(records),
        *_wall_time(config),
        heading("The recipe"),
        element("pre", to_toml(config)),
    ]
    return page(f"Training {config.folder.name}", *parts, style=plot.STYLE)


def _facts(
    config: Train, spec: ModelSpec, records: list[Record], held_out: Sequence[HeldOut]
) -> dict[str, str]:
    losses = [record.loss for record in records if record.loss is not None]
    speeds = sorted(record.tokens_per_s for record in records)
    facts = {
        "model": f"{spec.family}, {format_count(spec.parameters())} parameters",
        "precision": config.precision.kind + _fp8(config),
        "layout": config.parallel.words(),
        "steps": f"{records[-1].step if records else 0:,} of {config.steps:,}",
        "tokens": format_count(records[-1].tokens) if records else "0",
        "loss": f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else "none",
        "median tokens/s": f"{speeds[len(speeds) // 2]:,.0f}" if speeds else "none",
    }
    measured = [evaluation for evaluation in held_out if evaluation.loss is not None]
    if measured:
        facts["held-out loss"] = f"{measured[-1].loss:.3f}"
        if measured[-1].bits_per_byte is not None:
            facts["bits per byte"] = f"{measured[-1].bits_per_byte:.3f}"
        for name, loss in measured[-1].by_source.items():
            facts[f"held-out loss, {Path(name).name}"] = "none" if loss is None else f"{loss:.3f}"
    shares = sorted(record.mfu for record in records if record.mfu is not None)
    if shares:
        facts["median MFU"] = f"{shares[len(shares) // 2]:.1%}"
    peaks = [record.peak_gib for record in records if record.peak_gib is not None]
    if peaks:
        facts["peak memory"] = f"{max(peaks):.1f} GiB"
    if records:
        typical = sorted(record.seconds for record in records)[len(records) // 2]
        facts["median step"] = format_duration(typical)
    return facts


def _fp8(config: Train) -> str:
    return "" if config.precision.fp8 == "none" else f", fp8 by {config.precision.fp8}"


def _charts(records: list[Record], held_out: Sequence[HeldOut]) -> list[Markup]:
    def of(name: str) -> list[tuple[float, float]]:
        values = ((record.step, getattr(record, name)) for record in records)
        return [(step, value) for step, value in values if value is not None]

    losses = [Series("each step", of("loss"), "dots"), Series("mean", smoothed(records))]
    measured = [
        (float(evaluation.step), evaluation.loss)
        for evaluation in held_out
        if evaluation.loss is not None
    ]
    if measured:
        losses.append(Series("held out", measured))
    for name in dict.fromkeys(name for evaluation in held_out for name in evaluation.by_source):
        points = [
            (float(evaluation.step), evaluation.by_source.get(name)) for evaluation in held_out
        ]
        points_here = [(step, loss) for step, loss in points if loss is not None]
        losses.append(Series(f"held out, {Path(name).name}", points_here))
    charts = [
        chart("Loss", losses, x="step", y="nats per token"),
        chart("Learning rate", [Series("lr", of("lr"))], x="step", y="lr"),
        chart("Norm of the gradients", [Series("norm", of("norm"))], x="step", y="norm"),
        chart("Speed", [Series("tokens/s", of("tokens_per_s"))], x="step", y="tokens/s"),
    ]
    if of("mfu"):
        charts.append(chart("MFU", [Series("mfu", of("mfu"))], x="step", y="share of the peak"))
    return charts


def _texts(held_out: Sequence[HeldOut]) -> list[str]:
    """Generated texts, newest measurement first."""
    if not any(evaluation.texts for evaluation in held_out):
        return []
    rows = [
        [str(evaluation.step), text]
        for evaluation in reversed(held_out)
        for text in evaluation.texts
    ]
    return [
        heading("Texts"),
        *(element("p", element("b", f"step {step} "), text) for step, text in rows),
    ]


def _bad_steps(records: list[Record]) -> list[str]:
    bad = [record for record in records if record.bad]
    if not bad:
        return []
    rows = [[str(record.step), record.bad] for record in bad]
    return [heading("Steps that changed nothing"), table(["step", "why"], rows)]


def _wall_time(config: Train) -> list[str]:
    """Time breakdown and failures of a run with recovery."""
    ledger = read_ledger(config.folder)
    if ledger is None:
        return []
    share = {
        part: seconds / ledger.wall if ledger.wall else 0.0
        for part, seconds in ledger.parts.items()
    }
    rows = [
        [
            part,
            format_duration(round(seconds, 2)),
            f"{share[part]:.1%}",
            ", ".join(
                f"{cause} {spent:.1f} s" for cause, spent in ledger.by_cause.get(part, {}).items()
            ),
        ]
        for part, seconds in ledger.parts.items()
    ]
    parts: list[str] = [
        heading(f"Wall time, {ledger.ettr:.1%} of it productive"),
        table(["part", "time", "share", "causes"], rows),
    ]
    if ledger.incidents:
        names = ["step", "cause", "why", "answer", "steps lost", "found after", "back after"]
        parts += [heading("Failures"), table(names, [_cells(one) for one in ledger.incidents])]
    if ledger.slow:
        rows = [
            [str(one.rank), one.host, f"{one.step} to {one.until or 'the end'}", one.why]
            for one in ledger.slow
        ]
        parts += [heading("Slow ranks"), table(["rank", "host", "steps", "evidence"], rows)]
    return parts


def _cells(incident: JobIncident) -> list[str]:
    return [
        str(incident.step),
        incident.cause,
        incident.why,
        incident.rung,
        str(incident.steps_lost),
        f"{incident.detect_s:.2f} s",
        f"{incident.recovery_s:.2f} s",
    ]
