"""`cairn kernels`: what there is, whether it compiles well, what became of it, and what is fastest here.

`list`, `check`, `explain` and `build` need no GPU; `tune` does. Prints what `cairn.kernels` finds out.
"""

import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn.cli.kernels_build import run_build
from cairn.cli.subverbs import Subverb, dispatch
from cairn.core.config import load
from cairn.core.errors import UsageError, did_you_mean
from cairn.core.prose import in_terminal
from cairn.core.units import format_bytes, format_duration
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.kernels.tooling.build import Job
    from cairn.kernels.tooling.compiled import Compiled
    from cairn.kernels.tooling.lint import Finding
    from cairn.kernels.tooling.tune import Result

Stage = Literal["source", "ttir", "ttgir", "llir", "ptx", "sass"]

ABOUT = "The kernels: list them, compile and lint them without a GPU, look inside, build them ahead, tune them on one."


class List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name every kernel, with what it does."""

    json: bool = False
    """Print one JSON document instead of lines."""


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compile every variant of every kernel for sm_90, and lint the machine code. Needs no GPU.

    Fails on what does not compile, spills registers, serialises wgmma, needs more shared memory than a block can
    have, or lacks the tensor-core instructions that it should have. A second check is quick: results are kept.
    """

    only: list[str] = []
    """check these kernels, instead of all"""
    fresh: bool = False
    """compile again what is already known"""
    workers: Annotated[int, msgspec.Meta(ge=1)] = 2
    """how many compilers run at once"""
    json: bool = False
    """print one JSON document instead of lines"""


class Explain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Show what became of a kernel: every stage from Python to machine code, and what it takes to run."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """a kernel, see `cairn kernels list`"""
    variant: str | None = None
    """which configuration: its name, a part of it that no other has, or its number; the first by default"""
    html: Path | None = None
    """write one self-contained page with all stages side by side to this file"""
    stage: Stage | None = None
    """print the text of this stage instead of a summary"""
    json: bool = False
    """print the facts as one JSON document"""


class Tune(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Find the fastest configurations for this GPU, and write its table. Needs a CUDA device."""

    only: list[str] = []
    """tune these kernels, instead of all that can be"""
    match: str = ""
    """only keys of the table that contain this"""
    out: Path | None = None
    """write the table into this folder instead of cairn/kernels/tables"""
    budget_ms: float = 30.0
    """how long to time each candidate"""
    json: bool = False
    """print every trial as one JSON document"""


def run(args: list[str]) -> int:
    return dispatch("kernels", ABOUT, SUBVERBS, args)


def run_list(args: list[str]) -> int:
    options = load(List, args=args, env_prefix="CAIRN_KERNELS_LIST_").value
    from cairn.kernels.tooling.catalogue import kernels

    if options.json:
        rows = [{"name": name, **entry._asdict()} for name, entry in kernels().items()]
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return 0
    width = max(map(len, kernels()), default=0)
    for name, entry in kernels().items():
        print(in_terminal(f"{name:<{width}}  {entry.line}", " " * (width + 2)))
    return 0


def run_check(args: list[str]) -> int:
    options = load(Check, args=args, env_prefix="CAIRN_KERNELS_CHECK_").value
    from cairn.kernels.tooling import build
    from cairn.kernels.tooling.catalogue import chosen
    from cairn.kernels.tooling.lint import failed, lint

    wanted = build.jobs(chosen(options.only))
    found: list[tuple[Compiled, list[Finding]]] = []
    with progress(len(wanted), "compiling") as advance:
        for compiled in build.build(wanted, workers=options.workers, fresh=options.fresh):
            found.append((compiled, lint(compiled)))
            advance(compiled.variant)
    order = {(job.kernel, job.variant): place for place, job in enumerate(wanted)}
    found.sort(key=lambda pair: order[pair[0].kernel, pair[0].variant])
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(_document(found))).decode())
    else:
        _print_check(found)
    return 1 if any(failed(findings) for _, findings in found) else 0


def _document(found: list[tuple["Compiled", list["Finding"]]]) -> dict[str, object]:
    rows = []
    for compiled, findings in found:
        facts = msgspec.to_builtins(compiled)
        for texts in ("sources", "stages", "tools"):
            facts.pop(texts, None)
        rows.append({**facts, "findings": findings})
    fails = sum(finding.severity == "fail" for _, findings in found for finding in findings)
    tools = found[0][0].tools if found else ""
    return {"target": "sm_90a", "tools": tools, "failures": fails, "variants": rows}


def _print_check(found: list[tuple["Compiled", list["Finding"]]]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    by_kernel: dict[str, list[tuple[Compiled, list[Finding]]]] = defaultdict(list)
    for compiled, findings in found:
        by_kernel[compiled.kernel].append((compiled, findings))
    width = max(map(len, by_kernel), default=0)
    fails = 0
    for kernel, pairs in by_kernel.items():
        bad = [(c, f) for c, findings in pairs for f in findings if f.severity == "fail"]
        fails += len(bad)
        mark = "[red]✗[/]" if bad else "[green]✓[/]"
        console.print(f"{mark} {kernel:<{width}}  {escape(_ranges([c for c, _ in pairs]))}")
        for compiled, finding in bad:
            console.print(f"    [red]fail[/] {escape(compiled.variant)}: {escape(finding.message)}")
        for message, count in _counted(pairs).items():
            console.print(f"    [dim]info {escape(message)} ({count} of {len(pairs)})[/]")
    total = ((len(found), "variant"), (len(by_kernel), "kernel"), (fails, "failure"))
    variants, kernels, failures = (f"{n} {what}{'s' if n != 1 else ''}" for n, what in total)
    console.print(f"\n{variants} of {kernels}, {failures}")


def _ranges(variants: list["Compiled"]) -> str:
    built = [variant for variant in variants if variant.error is None]
    count = f"{len(variants):3} variant{'s' if len(variants) != 1 else ''}"
    if not built:
        return count
    registers = sorted({variant.registers for variant in built})
    most = f"{registers[0]} to {registers[-1]}" if len(registers) > 1 else f"{registers[0]}"
    shared = max(variant.shared_bytes for variant in built)
    return f"{count}, {most} registers, shared memory up to {format_bytes(shared)}"


def _counted(pairs: list[tuple["Compiled", list["Finding"]]]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for _, findings in pairs:
        for finding in findings:
            if finding.severity == "info":
                counts[finding.message] += 1
    return counts


def run_explain(args: list[str]) -> int:
    options = load(Explain, args=args, env_prefix="CAIRN_KERNELS_EXPLAIN_").value
    from cairn.kernels.tooling import build
    from cairn.kernels.tooling.catalogue import chosen
    from cairn.kernels.tooling.explain import render, summary
    from cairn.kernels.tooling.lint import lint

    jobs = build.jobs(chosen([options.name]))
    job = choose_variant(jobs, options.variant)
    compiled = build.build_one(job)
    findings = lint(compiled)
    if options.html is not None:
        others = [other.variant for other in jobs if other != job]
        _write(options.html, render(compiled, findings, others))
        sys.stderr.write(f"wrote {options.html}\n")
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(_document([(compiled, findings)]))).decode())
    elif options.stage is not None:
        print(compiled.stages.get(options.stage, ""))
    elif options.html is None:
        for line in summary(compiled, findings).splitlines():
            print(in_terminal(line, " " * 24))
        _name_others(job, jobs)
    return 1 if compiled.error else 0


def choose_variant(jobs: list["Job"], wanted: str | None) -> "Job":
    """Select a variant by name, by number from 1, or by a unique part of the name."""
    if wanted is None:
        return jobs[0]
    if wanted.isdecimal() and 1 <= int(wanted) <= len(jobs):
        return jobs[int(wanted) - 1]
    matches = [job for job in jobs if job.variant == wanted]
    matches = matches or [job for job in jobs if wanted.lower() in job.variant.lower()]
    if len(matches) == 1:
        return matches[0]
    names = [job.variant for job in matches or jobs]
    listed = "; ".join(names[:8]) + ("; ..." if len(names) > 8 else "")
    if matches:
        raise UsageError(f"{len(matches)} variants have '{wanted}' in their name", hint=listed)
    raise UsageError(
        f"no variant has '{wanted}' in its name", hint=did_you_mean(wanted, names, listed)
    )


def _name_others(job: "Job", jobs: list["Job"]) -> None:
    if len(jobs) > 1:
        print(f"\nother variants of {job.kernel} (--variant NUMBER)")
    for number, other in enumerate(jobs, start=1):
        if other != job:
            print(in_terminal(f"  {number:3}  {other.variant}", " " * 7))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot write {path}: {reason}", hint="name another file") from None


def run_tune(args: list[str]) -> int:
    options = load(Tune, args=args, env_prefix="CAIRN_KERNELS_TUNE_").value
    from cairn.kernels import tuned
    from cairn.kernels.tooling import catalogue
    from cairn.kernels.tooling.measure import require_gpu
    from cairn.kernels.tooling.tune import save, tune

    require_gpu()
    names = [n for n in catalogue.chosen(options.only) if catalogue.kernels()[n].tunable]
    total = sum(1 for name in names for _ in catalogue.load(name).tuning())
    results: list[Result] = []
    command = " ".join(["cairn kernels tune", *(f"--only {name}" for name in options.only)])
    folder = options.out or tuned.TABLES
    path = None
    with progress(total, "tuning") as advance:
        for result in tune(names, options.budget_ms, options.match):
            results.append(result)
            print(_trial_line(result), file=sys.stderr, flush=True)
            path = save(
                results, command, folder
            )  # each time: a run that is stopped keeps what it has
            advance(f"{result.kernel} {result.key}")
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(results)).decode())
    sys.stderr.write(f"wrote {path}\n" if path else "nothing to tune\n")
    return 0


def _trial_line(result: "Result") -> str:
    head = f"{result.kernel} {result.key}:"
    refused = [trial for trial in result.trials if trial.refused]
    notes = f", {len(refused)} refused ({refused[0].refused})" if refused else ""
    if result.best is None:
        return f"{head} no candidate runs{notes}"
    best = min(trial.ms for trial in result.trials if trial.ms is not None)
    gain = f"{result.gain:.2f}x the first of {len(result.trials)}"
    return f"{head} {format_duration(best / 1e3)}, {gain}: {result.best}{notes}"


SUBVERBS = {
    "list": Subverb(run_list, "every kernel, with what it does"),
    "check": Subverb(run_check, "compile and lint all of them for sm_90, without a GPU"),
    "explain": Subverb(run_explain, "one kernel from Python to machine code"),
    "build": Subverb(run_build, "compile what a model's engine launches, for machines with a GPU"),
    "tune": Subverb(run_tune, "find the fastest configurations on this GPU"),
}
