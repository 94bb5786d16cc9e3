"""`cairn jobs`: the jobs launched from here: how they are, what they wrote, why they do not run. Starts none."""

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import msgspec
import tyro

from cairn.cli.cluster.jobs_nodes import run_nodes
from cairn.cli.columns import lines
from cairn.cli.subverbs import Subverb, dispatch
from cairn.core.config import load

if TYPE_CHECKING:
    from cairn.cluster.records import JobRecord, JobStatus

ABOUT = "The jobs that `cairn launch` submitted from here."

Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


class Listed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every job, how it is, and why, in one line each."""

    all: bool = False
    """earlier runs of the same name, too"""
    json: bool = False
    """print the list as JSON"""


class Logs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Output of a job's ranks; that of the first failed rank comes last."""

    name: Name
    follow: bool = False
    """until the job ends"""
    rank: int | None = None
    """of this rank only"""
    agents: bool = False
    """what the agents wrote, too"""


class Why(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a job does not run, in one line; below it the first failing rank, if one failed."""

    name: Name
    json: bool = False


class Stop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End a job, and wait until nothing of it is left."""

    name: Name
    json: bool = False


def run(args: list[str]) -> int:
    return dispatch("jobs", ABOUT, SUBVERBS, args)


def run_list(args: list[str]) -> int:
    options = load(Listed, args=args, env_prefix="CAIRN_JOBS_LIST_").value
    from cairn.cluster import records

    newest = list(records.latest())
    every = [run for record in newest for run in records.runs(record.name)]
    shown = every if options.all else newest
    rows = [(record, _status(record)) for record in shown]
    if options.json:
        _print_json([_document(record, status) for record, status in rows])
        return 0
    if not rows:
        print("no jobs; launch one: cairn launch examples/jobs/train-tiny.toml --on local")
        return 0
    _print_table(rows, options.all)
    return 0


def _print_table(rows: "list[tuple[JobRecord, JobStatus]]", numbered: bool) -> None:
    cells = []
    for record, status in rows:
        name = f"{record.name} #{record.number}" if numbered else record.name
        cells.append((name, record.engine, _age(record.created), status.state, status.reason))
    headings = ("NAME", "ENGINE", "AGE", "STATE", "REASON")
    print("\n".join(lines(headings, cells, left=range(5))))


def run_logs(args: list[str]) -> int:
    options = load(Logs, args=args, env_prefix="CAIRN_JOBS_LOGS_").value
    from cairn.cluster import records
    from cairn.cluster.backends.catalogue import backend_of

    record = records.find(options.name)
    engine = backend_of(record)
    written = engine.lines(record, follow=options.follow)
    shown = show_lines(written, sys.stdout, options.rank, options.agents)
    if not shown:
        whose = "its ranks have" if options.rank is None else f"rank {options.rank} has"
        print(f"{whose} written nothing yet; --agents shows what the agents wrote", file=sys.stderr)
    status = engine.status(record)
    if status.failure:
        print(status.failure)
    return 0


def run_why(args: list[str]) -> int:
    options = load(Why, args=args, env_prefix="CAIRN_JOBS_WHY_").value
    from cairn.cluster import records

    record = records.find(options.name)
    status = _status(record)
    if options.json:
        from cairn.core.job_ledger_files import read_ledger

        _print_json(_document(record, status) | {"ledger": read_ledger(_run_folder(record))})
        return 0
    times = "1 restart" if status.restarts == 1 else f"{status.restarts} restarts"
    again = f" ({times})" if status.restarts else ""
    print(f"{record.name} on {record.engine} is {status.state}: {status.reason}{again}")
    from cairn.cluster import ettr

    over = status.state if status.state in records.ENDED else ""
    if (spent := ettr.why(_run_folder(record), over)) is not None:
        print(spent)
    if status.failure:
        print(status.failure)
    return 0


def run_stop(args: list[str]) -> int:
    options = load(Stop, args=args, env_prefix="CAIRN_JOBS_STOP_").value
    from cairn.cluster import records
    from cairn.cluster.backends.catalogue import backend_of
    from cairn.cluster.backends.interface import AlreadyEnded

    record = records.find(options.name)
    engine = backend_of(record)
    status = engine.status(record)
    if status.state in records.ENDED:
        raise AlreadyEnded(
            f"job '{record.name}' has ended already: {status.state}: {status.reason}",
            hint="there is nothing to stop; `cairn jobs list` has the others",
        )
    engine.stop(record)
    status = engine.status(record)
    if options.json:
        _print_json(_document(record, status))
        return 0
    print(f"{record.name}: {status.state}: {status.reason}")
    return 0


def show_lines(
    lines: Iterable[str], out: TextIO, rank: int | None = None, agents: bool = False
) -> int:
    """The lines of the ranks as they come, and how many; what a program wrote for programs is left out."""
    from cairn.core.rank_failure import MARK

    shown = 0
    for line in lines:
        name, bar, _ = line.partition("| ")
        of_rank = bool(bar) and name[:1] == "r" and name[1:].isdigit()
        if MARK in line or (not of_rank and not agents):
            continue
        if rank is None or name == f"r{rank}":
            print(line, file=out, flush=True)
            shown += 1
    return shown


def _run_folder(record: "JobRecord") -> Path:
    """Folder of the job's checkpoints and time ledger."""
    return Path(record.job().checkpoint.folder or record.folder / "checkpoints")


def _status(record: "JobRecord") -> "JobStatus":
    """An engine that does not answer is a reason, too."""
    from cairn.cluster.backends.catalogue import backend_of
    from cairn.cluster.backends.interface import EngineMissing, EngineUnreachable
    from cairn.cluster.records import JobStatus

    try:
        return backend_of(record).status(record)
    except (EngineMissing, EngineUnreachable) as error:
        return JobStatus(state="unknown", reason=error.message)


def _document(record: "JobRecord", status: "JobStatus") -> dict[str, object]:
    about = {"job": record.name, "run": record.number, "engine": record.engine, "id": record.id}
    return {**about, "created": record.created, **msgspec.to_builtins(status)}


def _age(created: float) -> str:
    from cairn.core.units import format_duration

    return format_duration(round(max(0.0, time.time() - created)))


def _print_json(document: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(document)).decode())


SUBVERBS: dict[str, Subverb] = {
    "list": Subverb(run_list, "every job: where, how, and why"),
    "logs": Subverb(run_logs, "what its ranks wrote"),
    "nodes": Subverb(run_nodes, "which nodes are left out, and why"),
    "stop": Subverb(run_stop, "end it, and leave nothing behind"),
    "why": Subverb(run_why, "why it does not run, in one line"),
}
