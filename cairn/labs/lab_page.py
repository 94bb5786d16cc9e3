"""Lab runs as one self-contained page, in two languages: open the file, press "中文".

    title, summary with a filter by verdict (many runs), machine
    for each lab: hypothesis, plots, checks (predicted | measured | gap), table, verdict, code, reading, questions

Both languages are in the page and a switch shows one of them, with style alone: it works without a script and without a
network. Draws what `Entry` and `Lab` say; a lab that no longer exists still shows its figures.
"""

from collections.abc import Mapping, Sequence

from cairn.labs import bilingual_page
from cairn.labs.bilingual_page import both, language_tag, switch
from cairn.labs.entry import CheckLine, Entry, PlotLines, TableLines, Where
from cairn.labs.figures import kind_sign, shown_cell, shown_gap, totals, with_unit
from cairn.labs.lab import AREAS, Lab, Language, Words
from cairn.labs.wording import RUN_SIGNS, WORDS
from cairn.report import plot
from cairn.report.page import Level, Markup, element, heading, join, page, table
from cairn.report.plot import Series, chart

LEVELS: dict[str, Level] = {
    "held": "good",
    "off": "bad",
    "busy": "note",
    "failed": "bad",
    "skipped": "note",
}


def render(entries: Sequence[Entry], labs: Mapping[str, Lab], language: Language = "en") -> str:
    """The page of one run of labs, or of one lab."""
    first = labs.get(entries[0].lab) if len(entries) == 1 else None
    title = first.title if first is not None else Words("Lab report", "实验报告")
    body = [switch(language)]
    if first is None:
        body += [both(totals(entries), "p"), _filter(entries), _summary(entries, labs)]
    if entries:
        body += [_machine(entries[-1].where)]
    body += [_lab(entry, labs.get(entry.lab), alone=first is not None) for entry in entries]
    return page(
        title.of(language),
        *body,
        style=plot.STYLE + bilingual_page.STYLE + STYLE + FILTER,
        language=language_tag(language),
    )


def _filter(entries: Sequence[Entry]) -> Markup:
    """Radio buttons: all runs, or those with one verdict; the style sheet hides the others."""
    found = [name for name in LEVELS if any(entry.status == name for entry in entries)]
    names = {"all": Words("all", "全部"), **{name: WORDS[name] for name in found}}
    parts = []
    for name, words in names.items():
        checked = " checked" if name == "all" else ""
        button = Markup(f'<input type="radio" name="verdict" id="only-{name}"{checked}>')
        parts.append(join([button, element("label", both(words), for_=f"only-{name}")]))
    return element("p", *parts, class_="switch filter")


def _summary(entries: Sequence[Entry], labs: Mapping[str, Lab]) -> Markup:
    rows = []
    for entry in entries:
        lab = labs.get(entry.lab)
        title = both(lab.title) if lab is not None else ""
        rows.append(
            [
                element("a", entry.lab, href=f"#{entry.lab}"),
                both(AREAS.get(entry.area, Words(entry.area, entry.area))),
                title,
                element(
                    "b",
                    both(WORDS[entry.status]),
                    class_=f"{LEVELS[entry.status]} is-{entry.status}",
                ),
                f"{entry.seconds:.1f} s" if entry.seconds else "–",
            ]
        )
    heads = [
        Words("lab", "实验"),
        Words("area", "领域"),
        Words("question", "问题"),
        Words("verdict", "结论"),
        Words("time", "用时"),
    ]
    return element("div", table([both(one) for one in heads], rows), class_="summary")


def _machine(where: Where) -> Markup:
    identity = where.identity
    pairs = {
        Words("device", "设备"): f"{where.device_name} ({where.device})",
        Words("CPU", "CPU"): f"{identity.cpu or '?'}, {identity.threads or '?'} threads",
        Words("GPUs", "GPU"): ", ".join(identity.gpus) or "–",
        Words("torch", "torch"): identity.torch or "–",
        Words("Cairn", "Cairn"): f"{where.cairn}{f' ({where.commit[:9]})' if where.commit else ''}",
    }
    cells = (
        element("div", element("dt", both(name)), element("dd", value))
        for name, value in pairs.items()
    )
    return element("dl", join(cells), class_="facts")


def _lab(entry: Entry, lab: Lab | None, alone: bool) -> Markup:
    parts: list[Markup] = []
    if not alone:
        name = both(lab.title) if lab is not None else entry.lab
        parts.append(element("h2", name, element("code", f" {entry.area}/{entry.lab}")))
    if lab is not None:
        parts.append(_titled(Words("Hypothesis", "假设"), both(lab.hypothesis, "p")))
    parts += [_verdict(entry)]
    if entry.plots:
        drawn = [_plot(one) for one in entry.plots]
        parts.append(element("div", *drawn, class_="plots"))
    if entry.checks:
        parts.append(_titled(WORDS["checks"], _checks(entry.checks)))
    if entry.table is not None:
        parts.append(_titled(Words("Figures", "数据"), _table(entry.table)))
    parts += [both(note, "p") for note in entry.notes]
    if entry.failure is not None:
        parts.append(element("pre", entry.failure))
    if lab is not None:
        parts += _around(lab)
    when = f"{entry.at}{', quick' if entry.quick else ''}, {entry.seconds:.1f} s"
    parts.append(element("p", when, class_="when"))
    return element("section", *parts, id=entry.lab, class_=entry.status)


def _verdict(entry: Entry) -> Markup:
    parts = [both(entry.verdict)]
    if entry.status != "held":  # one that held says so itself
        parts.insert(0, element("b", both(WORDS[entry.status]), ": "))
    return element("p", *parts, class_=f"notice {LEVELS[entry.status]} verdict")


def _checks(checks: Sequence[CheckLine]) -> Markup:
    names = ("what", "predicted", "measured", "gap", "allowed")
    heads = [*(WORDS[name] for name in names), Words("", "")]
    rows = [
        [
            both(check.what),
            both(with_unit(check.predicted, check.unit)),
            join([both(with_unit(check.measured, check.unit)), *_badge(check)]),
            shown_gap(check.gap),
            kind_sign(check),
            element(
                "b",
                RUN_SIGNS["held" if check.held else "off"],
                class_="good" if check.held else "bad",
            ),
        ]
        for check in checks
    ]
    return table([both(one) for one in heads], rows)


def _badge(check: CheckLine) -> list[Markup]:
    """A value that a simulator made says so."""
    return (
        [element("small", " ", both(WORDS["simulated"]), class_="badge")] if check.simulated else []
    )


def _table(lines: TableLines) -> Markup:
    heads = [both(one) for one in lines.columns]
    return table(heads, [[both(shown_cell(cell)) for cell in row] for row in lines.rows])


def _plot(lines: PlotLines) -> Markup:
    """Drawn once for each language: the words of a plot are part of the picture."""
    return join(
        element("div", _chart(lines, name), class_=name, lang=language_tag(name))
        for name in ("en", "zh")
    )


def _chart(lines: PlotLines, language: Language) -> Markup:
    limit = None
    if lines.limit is not None and lines.limit_name is not None:
        limit = (lines.limit_name.of(language), lines.limit)
    return chart(
        lines.title.of(language),
        [Series(one.name.of(language), one.points) for one in lines.lines],
        x=lines.x.of(language),
        y=lines.y.of(language),
        limit=limit,
        log_x=lines.log_x,
        log_y=lines.log_y,
    )


def _around(lab: Lab) -> list[Markup]:
    code = element("ul", *(element("li", element("code", place)) for place in lab.code))
    reading = element("ul", *(element("li", title) for title in lab.reading))
    questions = [
        element("details", element("summary", both(one.ask)), both(one.answer, "p"))
        for one in lab.questions
    ]
    return [
        _titled(WORDS["code"], code),
        _titled(WORDS["reading"], reading),
        _titled(WORDS["questions"], *questions),
    ]


def _titled(title: Words, *parts: Markup) -> Markup:
    return join([heading(both(title), 3), *parts])


STYLE = """
section { border-top: 1px solid var(--line); margin-top: 2rem; }
h3 { font-size: .95rem; margin: 1.1rem 0 .3rem; } h2 code { color: var(--soft); font-weight: 400; }
b.good { color: var(--good); } b.bad { color: var(--bad); } b.note { color: var(--soft); font-weight: 400; }
section ul { margin: .2rem 0; padding-left: 1.2rem; } section code { overflow-wrap: anywhere; }
details { max-width: 75ch; margin: .3rem 0; }
summary { cursor: pointer; } pre { overflow-x: auto; } .when { color: var(--soft); font-size: .8rem; }
.summary :is(td, th):is(:nth-child(2), :nth-child(3)) { text-align: left; font-family: inherit; }
"""

# A run that the filter leaves out: its section, and its line of the summary.
FILTER = "".join(
    f"body:has(#only-{name}:checked) :is(section:not(.{name}), .summary tbody tr:not(:has(.is-{name}))) "
    "{ display: none; }\n"
    for name in LEVELS
)
