"""The kind TrainJob: a job file as an object, which becomes a JobSet, a Volcano Job, a RayJob, or pods. Pure."""

from typing import Any

import msgspec

from cairn.cluster.backends.k8s_status import status_of
from cairn.cluster.backends.kubernetes import TARGETS, objects
from cairn.cluster.inventory import Cluster
from cairn.cluster.job_file import job_from
from cairn.cluster.operator.conditions import Condition
from cairn.cluster.operator.gang import gang_step
from cairn.cluster.operator.objects import Object
from cairn.cluster.operator.reconcile import Kind, Rendered, Seen
from cairn.cluster.resolve import Plan, resolve
from cairn.core.errors import ConfigError, did_you_mean

PODS = "pods"
NEEDS = {
    "jobset": "jobset.x-k8s.io/v1alpha2/JobSet",
    "volcano": "batch.volcano.sh/v1alpha1/Job",
    "rayjob": "ray.io/v1/RayJob",
}
UNSEEN = Cluster(engine="kubernetes", queues=[], needs_image=True, checked=False)
ENDED = ("Succeeded", "Failed")


def render(seen: Seen) -> Rendered:
    values: dict[str, Any] = dict(seen.resource.get("spec", {}))
    target = _target(str(values.pop("target", "auto")), seen)
    job = job_from({**values, "name": seen.name}, f"TrainJob {seen.name}")
    if job.kind != "train":
        raise ConfigError(f"kind is {job.kind!r}", hint="a server is an InferenceService")
    plan = resolve(job, UNSEEN)
    if seen.status.get("phase") in ENDED:
        return _over(seen)
    return _gang(seen, plan) if target == PODS else _delegated(seen, plan, target)


def _target(asked: str, seen: Seen) -> str:
    known = ("auto", *TARGETS, PODS)
    if asked not in known:
        near = did_you_mean(asked, known, otherwise=f"one of {', '.join(known)}")
        raise ConfigError(f"target is {asked!r}", hint=near)
    if asked != "auto":
        if asked in NEEDS and NEEDS[asked] not in seen.apis:
            raise ConfigError(
                f"target is {asked!r}, and this cluster has no {NEEDS[asked]}",
                hint="install its CRD and controller, or target: pods",
            )
        return asked
    if seen.status.get("target"):  # a CRD that comes later does not move a job that runs
        return seen.status["target"]
    return next((one for one in ("jobset", "volcano") if NEEDS[one] in seen.apis), PODS)


def _gang(seen: Seen, plan: Plan) -> Rendered:
    pods = [one for one in seen.children if one["kind"] == "Pod"]
    before = seen.status
    step = gang_step(plan, before.get("attempt", 0), before.get("phase"), pods)
    fields = {"target": PODS, "attempt": step.attempt, "phase": step.phase}
    part = _condition(step.phase, step.message)
    return Rendered(objects=step.objects, conditions=[part], fields=fields)


def _over(seen: Seen) -> Rendered:
    """A job that has ended is not made again, though controllers take its objects away a day later."""
    conditions = seen.status.get("conditions", [])
    last = next((one for one in conditions if one["type"] == "Complete"), {})
    part = _condition(seen.status["phase"], last.get("message", ""))
    return Rendered(objects=None, conditions=[part], fields=None)


def _delegated(seen: Seen, plan: Plan, target: str) -> Rendered:
    made = objects(plan, target)
    main = next(one for one in made if one["kind"] not in ("ConfigMap", "Secret"))
    live = seen.child(main["kind"], main["metadata"]["name"])
    if live is None:
        part = _condition("Running", "it is being created")
        return Rendered(objects=made, conditions=[part], fields={"target": target})
    status = status_of(live, [], [])
    phase = {"done": "Succeeded", "failed": "Failed"}.get(status.state, "Running")
    fields: Object = {"target": target, "attempt": status.restarts, "phase": phase}
    return Rendered(objects=made, conditions=[_condition(phase, status.reason)], fields=fields)


def _condition(phase: str, message: str) -> Condition:
    """Complete: unknown while it runs."""
    ok = {"Succeeded": True, "Failed": False}.get(phase)
    return Condition(type="Complete", ok=ok, reason=phase, message=message)


TRAIN_JOB = Kind(name="TrainJob", render=render)


class TrainTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What a TrainJob has beside the fields of a job file."""

    target: str = "auto"
    """auto, jobset, volcano, rayjob or pods"""
