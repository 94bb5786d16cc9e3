"""`cairn fleet apply FILE --on ENGINE`: one fleet file on this machine, Ray, Slurm or Kubernetes."""

import datetime
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.errors import UsageError

if TYPE_CHECKING:
    from cairn.fleet.config import FleetConfig


# As kubectl says that the server is gone or slow, which is no refusal.
NO_ANSWER = ("Unable to connect", "deadline exceeded", "connection refused", "imeout")


class FleetApply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run a fleet on an engine that is there: this machine, Ray, Slurm or Kubernetes.

    On local, ray and slurm it becomes a job of one node (`cairn jobs` shows, follows and stops it); on kubernetes,
    Deployments and Services, of which a second apply changes what differs.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """a fleet file, such as examples/fleet/local.toml"""
    on: Literal["local", "ray", "slurm", "kubernetes"] = "local"
    """the engine"""
    address: str = ""
    """of Ray's head (host:port), or a kubectl context; empty: as the environment says"""
    operator: bool = False
    """on kubernetes: as one InferenceService, for `cairn operator`, instead of Deployments and Services"""
    namespace: str = ""
    """on kubernetes; empty: that of the context"""
    dry_run: bool = False
    """print what would be submitted, and submit nothing"""
    json: bool = False
    """print what was submitted, or with --dry-run would be, as JSON"""


def run(args: list[str]) -> int:
    options = load(
        FleetApply, args=args, env_prefix="CAIRN_FLEET_APPLY_", prog="cairn fleet apply"
    ).value
    from cairn.fleet.apply import check_for, notes_on
    from cairn.fleet.config import read_fleet

    if options.on != "kubernetes" and (options.operator or options.namespace):
        given = "--operator" if options.operator else "--namespace"
        raise UsageError(f"{given} is given, and --on is {options.on}", hint="use --on kubernetes")
    config = read_fleet(options.file)
    check_for(config, options.on)
    for note in notes_on(config, options.on):
        print(f"note: {note}", file=sys.stderr)
    return _kubernetes(config, options) if options.on == "kubernetes" else _job(config, options)


def _job(config: "FleetConfig", options: FleetApply) -> int:
    from cairn.cli.cluster.launch import Launch, refuse_second, submit
    from cairn.cluster.backends.catalogue import backend
    from cairn.cluster.resolve import resolve
    from cairn.fleet.apply import job_of
    from cairn.fleet.listen import check_port

    job = job_of(config, str(options.file.absolute()))
    engine = backend(options.on, "", options.address)
    now = datetime.datetime.now(datetime.UTC)
    plan = resolve(job, engine.unseen() if options.dry_run else engine.look(), now)
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    if options.dry_run:
        _print_dry_run(config, options, engine.render(plan))
        return 0
    launch = Launch(job=options.file, on=options.on, address=options.address)
    refuse_second(job)
    if options.on == "local":
        check_port(config.router.host, config.router.port)
    record = submit(job, plan, engine, launch)
    if options.json:
        _print_json({"fleet": config.name, "engine": options.on, "id": record.id})
        return 0
    print(f"fleet '{config.name}' was submitted to {options.on} as {record.id or config.name}")
    print(f"  cairn jobs logs {config.name} --follow\n  cairn jobs stop {config.name}")
    return 0


def _kubernetes(config: "FleetConfig", options: FleetApply) -> int:
    from cairn.cluster.backends.interface import EngineMissing, EngineUnreachable, SubmitFailed
    from cairn.cluster.backends.kubernetes import to_yaml
    from cairn.fleet.apply import objects_of
    from cairn.fleet.service import service_object

    objects = (
        [service_object(config)] if options.operator else objects_of(config, _namespace(options))
    )
    if options.dry_run:
        _print_dry_run(config, options, to_yaml(objects), objects=objects)
        return 0
    if shutil.which("kubectl") is None:
        raise EngineMissing(
            "kubectl is not installed here", hint="look at the objects with --dry-run"
        )
    apply = ["apply", "--server-side", "--field-manager=cairn", "--filename=-"]
    done = _kubectl(options, *apply, given=to_yaml(_as_known(objects, options)))
    if not options.json:
        sys.stdout.write(done.stdout)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        if any(words in done.stderr for words in NO_ANSWER):
            raise EngineUnreachable(
                f"Kubernetes gave no answer in the middle of it: {said[-1]}",
                hint="apply it again: what was taken stays, and the rest follows",
            )
        hint = "`cairn fleet apply FILE --on kubernetes --dry-run` shows the objects"
        if options.operator and "no matches for kind" in done.stderr:
            hint = "`cairn operator manifests FOLDER` has the CRDs and the operator"
        raise SubmitFailed(
            f"Kubernetes refused the fleet: {said[-1] if said else done.returncode}", hint=hint
        )
    if options.json:
        applied = done.stdout.splitlines()
        _print_json({"fleet": config.name, "engine": options.on, "applied": applied})
    return 0


def _print_dry_run(
    config: "FleetConfig", options: FleetApply, text: str, **structured: object
) -> None:
    """`structured`: the same for machines, where it has more structure than a text."""
    if options.json:
        shown = structured or {"text": text}
        _print_json({"fleet": config.name, "engine": options.on, "dry_run": True, **shown})
    else:
        sys.stdout.write(text)


def _print_json(document: dict[str, object]) -> None:
    print(msgspec.json.encode(document).decode())


def _as_known(objects: list[dict[str, Any]], options: FleetApply) -> list[dict[str, Any]]:
    """Objects in the API versions that the cluster supports."""
    from cairn.cluster.backends.interface import EngineUnreachable
    from cairn.cluster.operator.objects import as_known

    done = _kubectl(options, "api-versions")
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise EngineUnreachable(
            f"kubectl gets no answer: {said[-1] if said else done.returncode}",
            hint="`kubectl config get-contexts` has the clusters; --address CONTEXT chooses one",
        )
    kinds = ("PodDisruptionBudget", "InferencePool", "ScaledObject")
    known = as_known(objects, {f"{line}/{kind}" for line in done.stdout.split() for kind in kinds})
    if len(known) < len(objects):
        left = {one["kind"] for one in objects} - {one["kind"] for one in known}
        print(f"note: the cluster has no {', '.join(sorted(left))}", file=sys.stderr)
    return known


def _namespace(options: FleetApply) -> str:
    """Namespace that kubectl will use."""
    if options.namespace or options.dry_run or shutil.which("kubectl") is None:
        return options.namespace or "default"
    said = _kubectl(options, "config", "view", "--minify", "--output=jsonpath={..namespace}")
    return said.stdout.strip() or "default"


def _kubectl(
    options: FleetApply, *words: str, given: str | None = None
) -> "subprocess.CompletedProcess[str]":
    where = [f"--context={options.address}"] if options.address else []
    where += [f"--namespace={options.namespace}"] if options.namespace else []
    argv = ["kubectl", *where, *words, "--request-timeout=60s"]
    return subprocess.run(argv, input=given, capture_output=True, text=True, check=False)
