"""What one run of a lab leaves behind: the line of the record, the JSON of `cairn lab run`, what the page draws.

    Lab + Outcome + Verdict ──measured_entry──> Entry ──> record (JSONL), --json, terminal, page

Everything that was measured is in it, in both languages. What never changes (hypothesis, code, questions) stays in the
lab's file and joins it again in `about`. A number that is none (NaN, infinity) is null. Runs nothing, opens nothing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import asdict

from cairn.hw.ceilings import Ceilings, Identity
from cairn.labs.glossary import label
from cairn.labs.lab import (
    Check,
    Kind,
    Lab,
    Outcome,
    Plot,
    Verdict,
    Words,
    gap_of,
    predicted_check,
    question_of,
)

SCHEMA = 1  # of an entry; another number is another format

# "busy": a check is off, and other programs held the machine's cores while it was measured
Status = Literal["held", "off", "busy", "failed", "skipped"]


class CheckLine(msgspec.Struct, frozen=True, kw_only=True):
    what: Words
    predicted: float | None
    measured: float | None
    unit: str
    kind: Kind
    within: float
    gap: float | None  # (measured - predicted) / |predicted|; null where that is no number
    held: bool
    simulated: bool = False


class Guess(msgspec.Struct, frozen=True, kw_only=True):
    """The learner's own prediction of one check, made before it was measured."""

    value: float
    measured: float | None
    factor: (
        float | None
    )  # how many times too large or too small; 1 is exact; null where it is no number
    unit: str = ""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    name: Words
    points: list[tuple[float, float]]


class PlotLines(msgspec.Struct, frozen=True, kw_only=True):
    title: Words
    x: Words
    y: Words
    lines: list[Line]
    log_x: bool = False
    log_y: bool = False
    limit_name: Words | None = None
    limit: float | None = None


class TableLines(msgspec.Struct, frozen=True, kw_only=True):
    columns: list[Words]
    rows: list[list[str | int | float | None]]


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the program that a figure belongs to."""

    identity: Identity
    device: str
    device_name: str
    cairn: str
    commit: str | None = None


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    lab: str
    area: str
    at: str  # UTC, ISO 8601
    seconds: float
    quick: bool
    status: Status
    verdict: Words
    where: Where
    checks: list[CheckLine] = []
    plots: list[PlotLines] = []
    table: TableLines | None = None
    notes: list[Words] = []
    calibrated: list[str] = []  # ceilings of machine.json that got better by this run
    failure: str | None = None  # the whole traceback
    guess: Guess | None = None
    settings: dict[str, float] = {}  # knobs that the learner set
    attempts: int = 1  # 2: a check was off, and this is what the second measurement found


def measured_entry(
    lab: Lab,
    outcome: Outcome,
    verdict: Verdict,
    *,
    at: str,
    seconds: float,
    quick: bool,
    where: Where,
    calibrated: Sequence[str] = (),
    guess: float | None = None,
    settings: Mapping[str, float] | None = None,
    busy: bool = False,
    attempts: int = 1,
) -> Entry:
    text = verdict.text if attempts == 1 else _again(verdict.text)
    return Entry(
        lab=lab.name,
        area=lab.area,
        at=at,
        seconds=round(seconds, 3),
        quick=quick,
        status="held" if verdict.held else "busy" if busy else "off",
        verdict=_while_busy(verdict.worst) if busy and not verdict.held else text,
        where=where,
        checks=[_check(check, lab.simulated) for check in outcome.checks],
        plots=[_plot(plot) for plot in outcome.plots],
        table=_table(outcome),
        notes=list(outcome.notes),
        calibrated=list(calibrated),
        guess=None if guess is None else _judged(guess, predicted_check(lab, outcome.checks)),
        settings=dict(settings or {}),
        attempts=attempts,
    )


def _judged(guess: float, check: Check | None) -> Guess:
    """Where this machine could not measure what was asked for, the guess has no score."""
    return (
        judge_guess(guess, math.nan)
        if check is None
        else judge_guess(guess, check.measured, check.unit)
    )


def judge_guess(guess: float, measured: float, unit: str = "") -> Guess:
    """How far a learner's number was from the measured one, as a factor of at least 1."""
    factor = None
    if math.isfinite(measured) and guess * measured > 0:
        factor = max(guess / measured, measured / guess)
    elif guess == measured:
        factor = 1.0
    return Guess(value=guess, measured=number(measured), factor=factor, unit=unit)


def _again(text: Words) -> Words:
    return Words(f"{text.en} (at the second attempt)", f"{text.zh}（第二次测量）")


def _while_busy(worst: Check) -> Words:
    """Without the causes of a gap: the machine is the cause."""
    gap = gap_of(worst)
    return Words(
        f"busy machine, measure again when it is idle ({gap.en})",
        f"机器繁忙，空闲时请重测（{gap.zh}）",
    )


def failed_entry(
    lab: Lab, failure: str, *, at: str, seconds: float, quick: bool, where: Where
) -> Entry:
    last = failure.strip().splitlines()[-1]
    return Entry(
        lab=lab.name,
        area=lab.area,
        at=at,
        seconds=round(seconds, 3),
        quick=quick,
        where=where,
        status="failed",
        verdict=Words(f"the lab failed: {last}", f"实验出错：{last}"),
        failure=failure,
    )


def skipped_entry(
    lab: Lab, reasons: Sequence[Words], *, at: str, quick: bool, where: Where
) -> Entry:
    verdict = Words("; ".join(why.en for why in reasons), "；".join(why.zh for why in reasons))
    return Entry(
        lab=lab.name,
        area=lab.area,
        at=at,
        seconds=0.0,
        quick=quick,
        where=where,
        status="skipped",
        verdict=verdict,
    )


def where_of(ceilings: Ceilings, cairn: str, commit: str | None) -> Where:
    return Where(
        identity=ceilings.identity,
        device=ceilings.device,
        device_name=ceilings.device_name,
        cairn=cairn,
        commit=commit,
    )


def about(
    lab: Lab, quick: bool = False, settings: Mapping[str, float] | None = None
) -> dict[str, object]:
    """What a lab is, as JSON: everything but its measurement; the question is that of this form."""
    question = question_of(lab, quick, settings or {})
    return {
        "name": lab.name,
        "area": lab.area,
        "title": asdict(lab.title),
        "hypothesis": asdict(lab.hypothesis),
        "needs": list(lab.needs),
        "seconds": lab.seconds,
        "predict": None if question is None else asdict(question),
        "why": None if lab.why is None else asdict(lab.why),
        "knobs": [msgspec.to_builtins(knob) for knob in lab.knobs],
        "now_try": [{"command": one.command, "look": asdict(one.look)} for one in lab.now_try],
        "code": list(lab.code),
        "reading": list(lab.reading),
        "causes": [asdict(cause) for cause in lab.causes],
        "questions": [
            {"ask": asdict(one.ask), "answer": asdict(one.answer)} for one in lab.questions
        ],
    }


def number(value: float) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None


def _check(check: Check, simulated: bool) -> CheckLine:
    return CheckLine(
        what=check.what,
        predicted=number(check.predicted),
        measured=number(check.measured),
        unit=check.unit,
        kind=check.kind,
        within=float(check.within),
        gap=number(check.gap),
        held=bool(check.held),
        simulated=check.simulated or simulated,
    )


def _plot(plot: Plot) -> PlotLines:
    name, value = plot.limit if plot.limit is not None else (None, None)
    return PlotLines(
        title=plot.title,
        x=plot.x,
        y=plot.y,
        lines=[
            Line(
                name=_named(line),
                points=[
                    (float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)
                ],
            )
            for line, points in plot.lines.items()
        ],
        log_x=plot.log_x,
        log_y=plot.log_y,
        limit_name=None if name is None else _named(name),
        limit=None if value is None else number(value),
    )


def _named(name: str | Words) -> Words:
    if isinstance(name, Words):
        return name
    return label(name)


def _table(outcome: Outcome) -> TableLines | None:
    if outcome.table is None:
        return None
    return TableLines(
        columns=list(outcome.table.columns),
        rows=[[_cell(cell) for cell in row] for row in outcome.table.rows],
    )


def _cell(cell: object) -> str | int | float | None:
    """Also numbers of numpy and of torch, which a lab may leave in its table."""
    if isinstance(cell, str):
        return str(cell)
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return int(cell)
    return number(float(cell))  # type: ignore[arg-type]
