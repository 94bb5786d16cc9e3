"""`cairn launch`: a job file onto an engine: shows what would be submitted, or submits and follows it."""

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn.core.config import load

if TYPE_CHECKING:
    from cairn.cluster.backends.interface import Backend
    from cairn.cluster.records import JobRecord
    from cairn.cluster.resolve import JobPlan
    from cairn.cluster.spec import Job


class Launch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run a job on an engine that is there: this machine, Ray, Slurm or Kubernetes.

    JOB is a TOML or JSON file (examples/jobs, docs/cluster.md). Follows the job's log until it ends; Ctrl-C leaves the
    job running.
    """

    job: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="JOB")]
    """the job, a TOML or JSON file"""
    on: Literal["local", "ray", "slurm", "kubernetes"] = "local"
    """the engine"""
    target: Literal["jobset", "volcano", "rayjob"] = "jobset"
    """on kubernetes: which kind of object a training job becomes"""
    address: str = ""
    """of Ray's head (host:port), or a kubectl context; empty: as the environment says"""
    dry_run: bool = False
    """print what would be submitted, and submit nothing"""
    detach: bool = False
    """leave as soon as it is submitted"""
    adopt: bool = False
    """go on from a checkpoint folder that another job wrote"""
    json: bool = False
    """print what was submitted and how it ended (or what a dry run would submit) as JSON; the log goes to stderr"""


def run(args: list[str]) -> int:
    options = load(Launch, args=args, env_prefix="CAIRN_LAUNCH_").value
    from cairn.cluster.backends.catalogue import backend
    from cairn.cluster.job_file import read_job
    from cairn.cluster.resolve import resolve

    _check(options)
    job = _absolute(read_job(options.job), options)
    now = datetime.datetime.now(datetime.UTC)
    engine = backend(options.on, options.target, options.address)
    if options.dry_run:
        plan = resolve(job, engine.unseen(), now)
        _notes(plan)
        _print_dry_run(plan, engine, options)
        return 0
    plan = _planned(job, engine, now)
    _notes(plan)
    record = submit(job, plan, engine, options)
    _print_outcome(record, job, options)
    if options.detach:
        if options.json:
            _print_json({"job": job.name, "engine": record.engine, "id": record.id})
        return 0
    return _follow(record, engine, options)


def _planned(job: "Job", engine: "Backend", now: "datetime.datetime") -> "JobPlan":
    """Resolve the job on the engine's nodes without cordoned ones."""
    from cairn.cluster import cordon_list
    from cairn.cluster.resolve import resolve

    seen = engine.look()
    if engine.name in ("local", "kubernetes"):  # one machine; a list of its own
        return resolve(job, seen, now)
    cluster, bad, notes = cordon_list.avoid(seen, cordon_list.current(), now.timestamp())
    return cordon_list.planned(resolve(job, cluster, now), bad, notes)


def _check(options: Launch) -> None:
    """A flag that would do nothing is a mistake."""
    from cairn.core.errors import UsageError

    if options.target != "jobset" and options.on != "kubernetes":
        raise UsageError(
            f"--target {options.target} is a kind of object on kubernetes, and the job goes to {options.on}",
            hint=f"--on kubernetes --target {options.target}",
        )
    if options.address and options.on in ("local", "slurm"):
        raise UsageError(
            f"--address is of Ray's head or a kubectl context, and the job goes to {options.on}",
            hint="leave it out" if options.on == "local" else "SLURM_CONF names another Slurm",
        )


def _absolute(job: "Job", options: Launch) -> "Job":
    """A folder is meant from here; a node of Ray or Slurm may be somewhere else."""
    folder = job.checkpoint.folder
    if folder is None or "://" in folder or options.on == "kubernetes":
        return job
    kept = msgspec.structs.replace(job.checkpoint, folder=str(Path(folder).absolute()))
    return msgspec.structs.replace(job, checkpoint=kept)


def submit(job: "Job", plan: "JobPlan", engine: "Backend", options: Launch) -> "JobRecord":
    """The record first: what the engine then holds can always be found again."""
    from cairn.cluster import records
    from cairn.core.errors import CairnError

    refuse_second(job)
    for name in job.after:
        records.find(name)  # a job that was never launched would be waited for in vain
    if options.on != "kubernetes":  # there the folder lies on a volume, maybe not seen from here
        records.claim_checkpoints(job, options.adopt)
    record = records.create(job, engine.name, options.target, options.address)
    try:
        return engine.submit(plan, record)
    except CairnError as error:
        records.write_status(
            record, records.JobStatus(state="failed", reason=f"not submitted: {error.message}")
        )
        raise


def refuse_second(job: "Job") -> None:
    """A name is free when its last job has ended."""
    from cairn.cluster.backends.catalogue import backend_of
    from cairn.cluster.backends.interface import EngineMissing, EngineUnreachable
    from cairn.cluster.records import ENDED, NameTaken, runs

    for earlier in runs(job.name)[-1:]:
        try:
            status = backend_of(earlier).status(earlier)
        except (EngineMissing, EngineUnreachable) as error:
            raise NameTaken(
                f"whether the earlier job '{job.name}' on {earlier.engine} has ended is not known: {error.message}",
                hint=f"give this one another name, or launch when that engine answers: {error.hint}",
            ) from None
        if status.state not in ENDED:
            raise NameTaken(
                f"a job '{job.name}' is {status.state} on {earlier.engine} already",
                hint=f"cairn jobs stop {job.name}, or give this one another name",
            )


def _print_dry_run(plan: "JobPlan", engine: "Backend", options: Launch) -> None:
    if not options.json:
        sys.stdout.write(engine.render(plan))
        return
    shown: dict[str, object] = {"job": plan.job.name, "engine": engine.name, "dry_run": True}
    if options.on == "kubernetes":
        from cairn.cluster.backends.kubernetes import objects

        shown["objects"] = objects(plan, options.target)
    else:
        shown["text"] = engine.render(plan)
    _print_json(shown)


def _notes(plan: "JobPlan") -> None:
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)


def _print_outcome(record: "JobRecord", job: "Job", options: Launch) -> None:
    out = sys.stderr if options.json else sys.stdout
    known = f" as {record.id}" if record.id else ""
    print(f"submitted '{job.name}' to {record.engine}{known}", file=out)
    for words in (f"logs {job.name} --follow", f"why {job.name}", f"stop {job.name}"):
        print(f"  cairn jobs {words}", file=out)
    out.flush()


def _follow(record: "JobRecord", engine: "Backend", options: Launch) -> int:
    from cairn.cli.cluster.jobs import show_lines

    out = sys.stderr if options.json else sys.stdout
    try:
        show_lines(engine.lines(record, follow=True), out)
    except KeyboardInterrupt:
        print(
            f"\njob '{record.name}' goes on; stop it: cairn jobs stop {record.name}",
            file=sys.stderr,
        )
        return 130
    status = engine.status(record)
    if options.json:
        _print_json(
            {"job": record.name, "engine": record.engine, "id": record.id, "status": status}
        )
        return 0 if status.state == "done" else 1
    print(f"{record.name}: {status.state}: {status.reason}")
    if status.failure:
        print(status.failure)
    return 0 if status.state == "done" else 1


def _print_json(document: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(document)).decode())
