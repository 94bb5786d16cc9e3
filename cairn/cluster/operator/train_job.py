"""The kind TrainJob: a job file as an object, which becomes a JobSet, a Volcano Job, a RayJob, or pods. Pure."""

from typing import Any

import msgspec

from cairn.cluster.backends.k8s_status import status_of
from cairn.cluster.backends.kubernetes import TARGETS, objects
from cairn.cluster.inventory import ClusterInventory
from cairn.cluster.job_file import job_from
from cairn.cluster.operator.conditions import Condition
from cairn.cluster.operator.gang import gang_step
from cairn.cluster.operator.objects import Object
from cairn.cluster.operator.reconcile import Observed, RenderedObjects, ResourceHandler
from cairn.cluster.resolve import JobPlan, resolve
from cairn.core.errors import ConfigError, did_you_mean

PODS = "pods"
NEEDS = {
    "jobset": "jobset.x-k8s.io/v1alpha2/JobSet",
    "volcano": "batch.volcano.sh/v1alpha1/Job",
    "rayjob": "ray.io/v1/RayJob",
}
UNSEEN = ClusterInventory(engine="kubernetes", queues=[], needs_image=True, checked=False)
ENDED = ("Succeeded", "Failed")


def render(observed: Observed) -> RenderedObjects:
    values: dict[str, Any] = dict(observed.resource.get("spec", {}))
    target = _target(str(values.pop("target", "auto")), observed)
    job = job_from({**values, "name": observed.name}, f"TrainJob {observed.name}")
    if job.kind != "train":
        raise ConfigError(f"kind is {job.kind!r}", hint="a server is an InferenceService")
    plan = resolve(job, UNSEEN)
    if observed.status.get("phase") in ENDED:
        return _over(observed)
    if target == PODS and job.queue is not None and not observed.status.get("target"):
        raise ConfigError(
            f"queue is {job.queue!r}, and pods that the operator starts itself wait in no queue",
            hint="leave `queue` out, or install JobSet and Kueue, or Volcano",
        )
    return _gang(observed, plan) if target == PODS else _delegated(observed, plan, target)


def _target(asked: str, observed: Observed) -> str:
    known = ("auto", *TARGETS, PODS)
    if asked not in known:
        near = did_you_mean(asked, known, otherwise=f"one of {', '.join(known)}")
        raise ConfigError(f"target is {asked!r}", hint=near)
    if asked != "auto":
        if asked in NEEDS and NEEDS[asked] not in observed.apis:
            raise ConfigError(
                f"target is {asked!r}, and this cluster has no {NEEDS[asked]}",
                hint="install its CRD and controller, or target: pods",
            )
        return asked
    if observed.status.get("target"):  # a CRD that comes later does not move a job that runs
        return observed.status["target"]
    return next((one for one in ("jobset", "volcano") if NEEDS[one] in observed.apis), PODS)


def _gang(observed: Observed, plan: JobPlan) -> RenderedObjects:
    pods = [one for one in observed.children if one["kind"] == "Pod"]
    before = observed.status
    step = gang_step(plan, before.get("attempt", 0), before.get("phase"), pods)
    fields = {"target": PODS, "attempt": step.attempt, "phase": step.phase}
    part = _condition(step.phase, step.message)
    return RenderedObjects(objects=step.objects, conditions=[part], fields=fields)


def _over(observed: Observed) -> RenderedObjects:
    """A job that has ended is not created again, though controllers take its objects away a day later."""
    conditions = observed.status.get("conditions", [])
    last = next((one for one in conditions if one["type"] == "Complete"), {})
    part = _condition(observed.status["phase"], last.get("message", ""))
    return RenderedObjects(objects=None, conditions=[part], fields=None)


def _delegated(observed: Observed, plan: JobPlan, target: str) -> RenderedObjects:
    rendered = objects(plan, target)
    main = next(one for one in rendered if one["kind"] not in ("ConfigMap", "Secret"))
    live = observed.child(main["kind"], main["metadata"]["name"])
    if live is None:
        part = _condition("Running", "it is being created")
        return RenderedObjects(objects=rendered, conditions=[part], fields={"target": target})
    status = status_of(live, [], [])
    phase = {"done": "Succeeded", "failed": "Failed"}.get(status.state, "Running")
    fields: Object = {"target": target, "attempt": status.restarts, "phase": phase}
    return RenderedObjects(
        objects=rendered, conditions=[_condition(phase, status.reason)], fields=fields
    )


def _condition(phase: str, message: str) -> Condition:
    """Complete: unknown while it runs."""
    ok = {"Succeeded": True, "Failed": False}.get(phase)
    return Condition(type="Complete", ok=ok, reason=phase, message=message)


TRAIN_JOB = ResourceHandler(name="TrainJob", render=render)


class TrainTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a TrainJob in addition to those of a job file."""

    target: str = "auto"
    """auto, jobset, volcano, rayjob or pods"""
