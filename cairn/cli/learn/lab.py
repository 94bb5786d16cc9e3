"""`cairn lab`: experiments with a hypothesis, a prediction from this machine's ceilings, and a verdict.

    cairn lab list                      which there are, and which of them this machine can run
    cairn lab run roofline              one, with its plot, its checks, the code to read, its questions
    cairn lab run roofline --predict 12 your own number first; the record keeps how far off you were
    cairn lab run --area serving        all of an area; --all runs every one
    cairn lab report --html labs.html   what the record has, the newest run of each

    0 ran (also where a verdict is "off": that is a result)   1 a lab failed
    3 a lab that was named cannot run here; the others that were named have run

Chooses and prints; `cairn.labs` runs, records and draws.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn.cli.subverbs import Subverb, dispatch
from cairn.core.config import load
from cairn.core.errors import DataError, UsageError

if TYPE_CHECKING:
    from cairn.hw.ceilings import Ceilings
    from cairn.hw.machine import Machine
    from cairn.labs.entry import Entry
    from cairn.labs.lab import Lab
    from cairn.labs.runner import Session

ABOUT = "Labs: each idea of the field as an experiment on this machine, predicted and measured."

EXIT_FAILED, EXIT_UNMET = 1, 3

Names = Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME ...]")]
Language = Literal["en", "zh"]


class Listed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every lab: what it asks, how long it takes, and whether this machine can run it."""

    area: str | None = None
    """of this area only: gpu, pytorch, comm, training, serving, cluster, linux, llm, projects"""
    lang: Language = "en"
    """language of the titles: en or zh"""
    json: bool = False
    """print one JSON document"""
    markdown: bool = False
    """print the table that docs/labs.md has"""


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run labs: predict, measure, judge. Results go to your lab record and to machine.json."""

    names: Names = []
    """labs to run; `cairn lab list` has them"""
    area: str | None = None
    """every lab of this area"""
    all: bool = False
    """every lab"""
    predict: float | None = None
    """your own number for what the lab asks for, before it is measured"""
    set: list[str] = []
    """knobs of the lab, such as n=512; `cairn lab list --json` names them"""
    quick: bool = False
    """smaller sizes and fewer repeats; wider spread"""
    answers: bool = False
    """print the model answers below the questions"""
    full: bool = False
    """print everything of each lab, also where many run"""
    html: Path | None = None
    """write one self-contained page to this file"""
    lang: Language = "en"
    """language of what is printed, and the page's first one: en or zh"""
    json: bool = False
    """print one JSON document"""


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Your lab record: the newest run of each lab."""

    area: str | None = None
    """of this area only"""
    html: Path | None = None
    """write one self-contained page to this file"""
    lang: Language = "en"
    """language of what is printed, and the page's first one: en or zh"""
    json: bool = False
    """print one JSON document"""


def run(args: list[str]) -> int:
    return dispatch("lab", ABOUT, SUBVERBS, args)


def run_list(args: list[str]) -> int:
    options = load(Listed, args=args, env_prefix="CAIRN_LAB_LIST_").value
    from cairn.cli.learn import lab_show
    from cairn.hw.probe import probe
    from cairn.labs.catalogue import all_labs, labs_of
    from cairn.labs.entry import about
    from cairn.labs.needs import unmet

    labs = labs_of(options.area) if options.area is not None else list(all_labs().values())
    if options.markdown:
        print(lab_show.markdown(labs, options.lang), end="")
        return 0
    machine = probe()
    why = {lab.name: unmet(lab.needs, machine) for lab in labs}
    if options.json:
        _print_json(
            [
                {
                    **about(lab),
                    "unmet": [msgspec.structs.asdict(reason) for reason in why[lab.name]],
                }
                for lab in labs
            ]
        )
        return 0
    print("\n".join(lab_show.listing(labs, why, options.lang)))
    return 0


def run_run(args: list[str]) -> int:
    options = load(Run, args=args, env_prefix="CAIRN_LAB_RUN_").value
    labs = _chosen(options)
    if options.html is not None:
        require_place(options.html)
    from cairn.cli.learn.lab_progress import LabProgress
    from cairn.hw.probe import probe
    from cairn.labs.runner import prepare, run_lab

    machine = probe()
    alone = len(labs) == 1
    if not options.area and not options.all:
        _refuse_unmet(labs, machine, options.lang)
    settings = _settings(labs, options)
    guess = _guess(labs, options, settings)
    session = _session(machine, options.quick, settings)
    prepare(labs)
    entries: list[Entry] = []
    kept = True  # a record that cannot be written is said once, and costs no measurement
    progress = LabProgress(labs, options.quick)
    try:
        for lab in labs:
            with progress.of(lab) as step:
                entry = run_lab(lab, session, step, guess)
            entries.append(entry)
            kept = kept and _keep(entry)
            if not options.json:
                print("\n".join(_text(lab, entry, options, alone)), flush=True)
    except KeyboardInterrupt:
        _log_line(f"stopped after {len(entries)} of {len(labs)} labs")
        _finish(labs, entries, options)
        raise
    return _finish(labs, entries, options)


def run_report(args: list[str]) -> int:
    options = load(Report, args=args, env_prefix="CAIRN_LAB_REPORT_").value
    from cairn.cli.learn import lab_show
    from cairn.labs import record
    from cairn.labs.catalogue import all_labs, labs_of
    from cairn.labs.figures import totals
    from cairn.labs.prediction_accuracy import foresight, said
    from cairn.labs.wording import WORDS

    if options.html is not None:
        require_place(options.html)
    labs = all_labs()
    wanted = labs if options.area is None else {lab.name for lab in labs_of(options.area)}
    kept = record.read()
    for trouble in kept.trouble:
        _log_line(trouble)
    newest = record.latest(kept.entries)
    entries = [newest[name] for name in labs if name in newest and name in wanted]
    if options.area is None:  # a lab that is gone leaves its figures
        entries += [entry for name, entry in newest.items() if name not in labs]
    if options.html is not None:
        _write_page(entries, labs, options.html, options.lang)
    if options.json:
        runs = _documents(entries, labs)
        _print_json({"record": str(record.record_file()), "runs": runs})
    elif not entries:
        print(WORDS["no runs"].of(options.lang))
    else:
        for entry in entries:
            print(f"{entry.at[:10]}  {lab_show.line(entry, options.lang)}")
        print(totals(entries).of(options.lang))
        if (seen := foresight(kept.entries)) is not None:
            print(said(seen).of(options.lang))
    return 0


def _settings(labs: "list[Lab]", options: Run) -> dict[str, float]:
    """NAME=NUMBER of each --set; a knob that the lab does not have is refused before anything is measured."""
    found: dict[str, float] = {}
    if options.set and len(labs) != 1:
        raise UsageError("--set is for one lab", hint="name one lab")
    for written in options.set:
        name, _, value = written.partition("=")
        knobs = {knob.name: knob for knob in labs[0].knobs}
        if name not in knobs:
            has = f"its knobs are: {', '.join(sorted(knobs))}" if knobs else "it has no knobs"
            raise UsageError(f"lab {labs[0].name} has no knob '{name}'", hint=has)
        try:
            found[name] = float(value)
        except ValueError as error:
            raise UsageError(
                f"--set {written}: '{value}' is no number", hint=f"such as --set {name}=64"
            ) from error
        knob = knobs[name]
        if not knob.least <= found[name] <= knob.most:
            bounds = f"{knob.least:,g} to {knob.most:,g}"
            raise UsageError(f"--set {written}: {name} ({knob.what.en}) goes from {bounds}")
    return found


def _guess(labs: "list[Lab]", options: Run, settings: dict[str, float]) -> float | None:
    """The learner's own number: from --predict, or asked for at a terminal where the lab has a question."""
    from cairn.labs.lab import question_of
    from cairn.labs.wording import WORDS

    if options.predict is not None:
        if len(labs) != 1:
            raise UsageError("--predict is for one lab", hint="name one lab")
        return options.predict
    question = question_of(labs[0], options.quick, settings) if len(labs) == 1 else None
    if question is None or options.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    print(f"{WORDS['predict first'].of(options.lang)}: {question.of(options.lang)}")
    try:
        return float(input(WORDS["skip"].of(options.lang)))
    except (ValueError, EOFError):
        return None


def _chosen(options: Run) -> "list[Lab]":
    from cairn.labs.catalogue import all_labs, find_lab, labs_of

    ways = [bool(options.names), options.area is not None, options.all]
    if sum(ways) != 1:
        what = "no lab is named" if not any(ways) else "labs are chosen in more than one way"
        raise UsageError(what, hint="give names, or --area AREA, or --all; see `cairn lab list`")
    if options.all:
        return list(all_labs().values())
    if options.area is not None:
        return labs_of(options.area)
    return [find_lab(name) for name in dict.fromkeys(options.names)]


def _refuse_unmet(labs: "list[Lab]", machine: "Machine", language: Language) -> None:
    """Raise if none of the named labs can run on this machine."""
    from cairn.labs.needs import unmet
    from cairn.labs.wording import WORDS

    reasons = [unmet(lab.needs, machine) for lab in labs]
    if all(reasons):
        why = "; ".join(reason.of(language) for reason in reasons[0])
        raise UnmetNeed(
            WORDS["cannot run"].of(language).format(lab=labs[0].name, why=why),
            hint=WORDS["can run"].of(language),
        )


class UnmetNeed(UsageError):
    """The machine lacks what a lab needs."""

    exit_status = EXIT_UNMET


def _session(machine: "Machine", quick: bool, settings: "Mapping[str, float]") -> "Session":
    from cairn import __version__
    from cairn.bench.record import current_commit
    from cairn.labs import calibration
    from cairn.labs.busy import Watch
    from cairn.labs.entry import where_of
    from cairn.labs.runner import Session

    ceilings = calibration.ready(machine, _quick_look, _log_line)
    where = where_of(ceilings, __version__, current_commit())
    return Session(
        machine=machine,
        ceilings=ceilings,
        where=where,
        quick=quick,
        log_line=_log_line,
        settings=settings,
        watch=Watch(),
    )


def _keep(entry: "Entry") -> bool:
    from cairn.labs import record

    if entry.status == "skipped":
        return True
    try:
        record.append(entry)
    except DataError as error:
        _log_line(f"{error.message}; these runs are not kept ({error.hint})")
        return False
    return True


def _quick_look(machine: "Machine") -> "Ceilings":
    from cairn.cli.calibrate import progress_bar
    from cairn.hw.calibrate import calibrate

    with progress_bar() as progress:
        return calibrate(machine, quick=True, progress=progress)


def _text(lab: "Lab", entry: "Entry", options: Run, alone: bool) -> list[str]:
    from cairn.cli.learn import lab_show

    if alone or options.full:
        return lab_show.whole(lab, entry, options.lang, options.answers)
    return [lab_show.line(entry, options.lang)]


def _finish(labs: "list[Lab]", entries: "list[Entry]", options: Run) -> int:
    from cairn.labs.figures import totals

    by_name = {lab.name: lab for lab in labs}
    if options.html is not None:
        _write_page(entries, by_name, options.html, options.lang)
    if options.json:
        _print_json({"runs": _documents(entries, by_name)})
    elif len(labs) > 1:
        print(totals(entries).of(options.lang))
    failed = [entry for entry in entries if entry.failure is not None]
    for entry in failed:
        sys.stdout.flush()
        sys.stderr.write(f"lab {entry.lab} failed:\n{entry.failure}")
    if failed:
        return EXIT_FAILED
    named = not options.area and not options.all
    return EXIT_UNMET if named and any(entry.status == "skipped" for entry in entries) else 0


def _documents(entries: "Iterable[Entry]", labs: "Mapping[str, Lab]") -> list[dict[str, object]]:
    """Each run with what its lab is; a lab that is gone leaves only its run."""
    from cairn.labs.entry import about

    return [
        {
            **msgspec.to_builtins(entry),
            "about": about(labs[entry.lab], entry.quick, entry.settings)
            if entry.lab in labs
            else None,
        }
        for entry in entries
    ]


def _write_page(
    entries: "list[Entry]", labs: "Mapping[str, Lab]", path: Path, language: Language
) -> None:
    from cairn.labs.lab_page import render

    path.write_text(render(entries, labs, language), encoding="utf-8")
    _log_line(f"wrote {path}")


def require_place(path: Path) -> None:
    """A page that cannot be written is refused before anything is measured."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "it is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}"
        raise UsageError(f"cannot write {path}: {what}", hint="name a file in a folder that exists")


def _print_json(document: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(document)).decode())


def _log_line(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


SUBVERBS: dict[str, Subverb] = {
    "list": Subverb(run_list, "which labs there are, and which of them this machine can run"),
    "run": Subverb(run_run, "run one, an area or all: prediction, measurement, verdict"),
    "report": Subverb(run_report, "what your lab record has, in the terminal or as a page"),
}
