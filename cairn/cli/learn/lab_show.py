"""A lab and its run as text for a terminal, in English or in Chinese. Prints nothing itself.

line      held  roofline   as predicted within 7%   3.9 s
whole     hypothesis, plots, checks, table, verdict, code, reading, questions
listing   all labs, area after area
markdown  the table of docs/labs.md
"""

import shutil
import sys
from collections.abc import Mapping, Sequence

from cairn.cli import columns
from cairn.cli.learn.learn_show import wrapped
from cairn.core.prose import in_terminal
from cairn.labs.code_location import find_place
from cairn.labs.entry import CheckLine, Entry, PlotLines
from cairn.labs.figures import kind_sign, shown_cell, shown_gap, with_unit
from cairn.labs.lab import AREAS, Lab, Language, Words
from cairn.labs.prediction_accuracy import said_guess
from cairn.labs.wording import RUN_SIGNS, WORDS
from cairn.report.terminal_plot import draw


def line(entry: Entry, language: Language) -> str:
    took = f"  ({entry.seconds:.1f} s)" if entry.seconds else ""
    return f"{RUN_SIGNS[entry.status]} {entry.lab}: {entry.verdict.of(language)}{took}"


def whole(lab: Lab, entry: Entry, language: Language, answers: bool) -> list[str]:
    text = [f"{lab.title.of(language)}  ({lab.area}/{lab.name})", ""]
    text += _section("hypothesis", _wrapped(lab.hypothesis.of(language)), language)
    for plot in entry.plots:
        text += [*_plot(plot, language), ""]
    if entry.table is not None:
        rows = [[shown_cell(cell).of(language) for cell in row] for row in entry.table.rows]
        text += [
            *columns.lines([_of(name, language) for name in entry.table.columns], rows, left=[0]),
            "",
        ]
    if entry.checks:
        text += _section("checks", _checks(entry.checks, language), language)
    for note in entry.notes:
        text += [*_wrapped(_of(note, language)), ""]
    sign = RUN_SIGNS[entry.status]
    verdict = _wrapped(f"{sign} {_of(entry.verdict, language)} ({entry.seconds:.1f} s)")
    text += _section("verdict", verdict, language)
    if entry.guess is not None and entry.checks:
        guess = said_guess(entry.guess)
        text += _section("your prediction", _wrapped(guess.of(language)), language)
    if lab.why is not None and entry.checks:
        text += _section("why", _wrapped(lab.why.of(language)), language)
    if entry.calibrated:
        text += [f"{WORDS['calibrated'].of(language)}: {', '.join(entry.calibrated)}", ""]
    return text + _around(lab, language, answers)


def listing(
    labs: Sequence[Lab], unmet: Mapping[str, Sequence[Words]], language: Language
) -> list[str]:
    text: list[str] = []
    width = max((len(lab.name) for lab in labs), default=0)
    for area, title in AREAS.items():
        of_area = [lab for lab in labs if lab.area == area]
        if not of_area:
            continue
        text += [f"{title.of(language)} ({area})"]
        for lab in of_area:
            why = "; ".join(reason.of(language) for reason in unmet[lab.name])
            sign, more = ("–", f"  [{why}]") if why else (" ", "")
            row = f"{sign} {lab.name:<{width}}  {lab.title.of(language)}{more}"
            text.append(in_terminal(row, " " * (width + 4)))
        text.append("")
    minutes = sum(lab.seconds for lab in labs if not unmet[lab.name]) / 60
    count = sum(not unmet[lab.name] for lab in labs)
    if language == "zh":
        text.append(f"共 {len(labs)} 个实验，本机可运行 {count} 个，约 {minutes:.0f} 分钟")
    else:
        text.append(f"{len(labs)} labs; this machine can run {count}, in about {minutes:.0f} min")
    return text


def markdown(labs: Sequence[Lab], language: Language) -> str:
    text: list[str] = []
    for area, title in AREAS.items():
        of_area = [lab for lab in labs if lab.area == area]
        if not of_area:
            continue
        heads = ("lab", "what it asks", "needs") if language == "en" else ("实验", "问题", "需要")
        text += [
            f"### {title.of(language)} (`{area}`)",
            "",
            f"| {' | '.join(heads)} |",
            "|---|---|---|",
        ]
        for lab in of_area:
            asks = lab.title.of(language).replace("|", "\\|")
            text.append(f"| `{lab.name}` | {asks} | {', '.join(lab.needs)} |")
        text.append("")
    return "\n".join(text)


def _checks(checks: Sequence[CheckLine], language: Language) -> list[str]:
    heads = [
        "",
        *(WORDS[name].of(language) for name in ("predicted", "measured")),
        *([WORDS["simulated"].of(language)] if any(check.simulated for check in checks) else []),
        *(WORDS[name].of(language) for name in ("gap", "allowed")),
    ]
    rows = [
        [
            f"{RUN_SIGNS['held' if check.held else 'off']} {_of(check.what, language)}",
            with_unit(check.predicted, check.unit).of(language),
            *_measured(check, any(one.simulated for one in checks), language),
            shown_gap(check.gap),
            kind_sign(check),
        ]
        for check in checks
    ]
    narrow = shutil.get_terminal_size().columns - 2 if sys.stdout.isatty() else None
    return columns.lines(heads, rows, left=[0], width=narrow)


def _measured(check: CheckLine, two_columns: bool, language: Language) -> list[str]:
    """A simulated value stands in a column of its own."""
    shown = with_unit(check.measured, check.unit).of(language)
    if not two_columns:
        return [shown]
    return ["", shown] if check.simulated else [shown, ""]


def _plot(plot: PlotLines, language: Language) -> list[str]:
    lines = {_of(one.name, language): one.points for one in plot.lines}
    limit = None
    if plot.limit is not None and plot.limit_name is not None:
        limit = (_of(plot.limit_name, language), plot.limit)
    drawn = draw(lines, log_x=plot.log_x, log_y=plot.log_y, limit=limit)
    title = f"{_of(plot.title, language)}: {_of(plot.y, language)} / {_of(plot.x, language)}"
    return [title, *(f"  {row}" for row in drawn)]


def _around(lab: Lab, language: Language, answers: bool) -> list[str]:
    """The way into the code, and what to think about."""
    text = _section("code", [str(find_place(place)) for place in lab.code], language)
    reading = [row for one in lab.reading for row in _wrapped(one)]
    text += _section("reading", reading, language)
    asked: list[str] = []
    for number, question in enumerate(lab.questions, 1):
        asked += _wrapped(f"{number}. {question.ask.of(language)}")
        if answers:
            asked += [f"   {row}" for row in _wrapped(question.answer.of(language), 5)]
    text += _section("questions" if answers else "questions hidden", asked, language)
    if not lab.now_try:
        return text
    steps: list[str] = []
    for one in lab.now_try:
        steps += [one.command, *(f"  {row}" for row in _wrapped(one.look.of(language), 4))]
    return text + _section("now try", steps, language)


def _section(name: str, rows: Sequence[str], language: Language) -> list[str]:
    return [WORDS[name].of(language), *(f"  {row}" for row in rows), ""]


def _of(text: Words, language: Language) -> str:
    return text.of(language)


def _wrapped(text: str, margin: int = 2) -> list[str]:
    """Lines that fit beside a margin of so many cells."""
    return [row[margin:] for row in wrapped(text, " " * margin)]
