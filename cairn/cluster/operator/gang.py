"""A training job as pods that the operator makes itself, on clusters that have neither JobSet nor Volcano. Pure.

    attempt 0: pods NAME-ROLE-0-0 ... all at once     one fails -> attempt 1: the old ones go first, then new ones
    all succeeded -> Succeeded                        a mistake of the user's, or too many attempts -> Failed

The attempt stands in the status before any pod of the last one is deleted, so a crash in between changes nothing.
"""

import math
from typing import Literal

import msgspec

from cairn.cluster.backends.k8s_pod import Object, labels, secret_objects
from cairn.cluster.backends.k8s_train import replicated_pod
from cairn.cluster.pod_agent import MISTAKE
from cairn.cluster.resolve import JobPlan

ATTEMPT = "cairn.dev/attempt"  # a label of its pods

Phase = Literal["Running", "Restarting", "Succeeded", "Failed"]


class GangStep(msgspec.Struct, frozen=True, kw_only=True):
    """`objects` None: the children stay as they are."""

    phase: Phase
    attempt: int
    message: str
    objects: list[Object] | None


def gang_step(plan: JobPlan, attempt: int, phase: Phase | None, pods: list[Object]) -> GangStep:
    """Desired objects of a gang, from the status's attempt and phase and the observed pods."""
    if phase in ("Succeeded", "Failed"):
        return GangStep(phase=phase, attempt=attempt, message="", objects=None)
    wanted = gang_objects(plan, attempt)
    names = {one["metadata"]["name"] for one in wanted if one["kind"] == "Pod"}
    now = [one for one in pods if one["metadata"].get("labels", {}).get(ATTEMPT) == str(attempt)]
    phases = {one["metadata"]["name"]: one.get("status", {}).get("phase") for one in now}
    failed = [one for one in now if one.get("status", {}).get("phase") == "Failed"]
    if failed:
        return _after_failure(plan, attempt, failed)
    if names and all(phases.get(name) == "Succeeded" for name in names):
        said = f"{len(names)} pods finished"
        return GangStep(phase="Succeeded", attempt=attempt, message=said, objects=None)
    if len(now) < len(pods):  # the ports of the last attempt have to be free first
        said = f"{len(pods) - len(now)} pods of the last attempt are still there"
        kept = [one for one in wanted if one["kind"] != "Pod" or one["metadata"]["name"] in phases]
        return GangStep(phase="Restarting", attempt=attempt, message=said, objects=kept)
    running = sum(one == "Running" for one in phases.values())
    said = f"{running} of {len(names)} pods run"
    return GangStep(phase="Running", attempt=attempt, message=said, objects=wanted)


def _after_failure(plan: JobPlan, attempt: int, failed: list[Object]) -> GangStep:
    first = failed[0]
    name, code = first["metadata"]["name"], exit_code(first)
    said = f"{name} ended with {code}" if code is not None else f"{name} failed"
    restarts = 0 if plan.job.restart.policy == "fail" else plan.job.restart.max
    if code == MISTAKE:
        said += ": a mistake in what was asked, which no restart helps"
    elif attempt < restarts:
        return GangStep(phase="Restarting", attempt=attempt + 1, message=said, objects=None)
    else:
        said += f", after {attempt} restarts"
    return GangStep(phase="Failed", attempt=attempt, message=said, objects=None)


def exit_code(pod: Object) -> int | None:
    for one in pod.get("status", {}).get("containerStatuses", []):
        ended = one.get("state", {}).get("terminated")
        if ended and ended.get("exitCode"):
            return ended["exitCode"]
    return None


def gang_objects(plan: JobPlan, attempt: int) -> list[Object]:
    """A headless Service, by which pods find each other, and the pods."""
    job = plan.job
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name, "labels": labels(job, "all")},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"cairn/job": job.name},
        },
    }
    objects: list[Object] = [*secret_objects(plan), service]
    for group in plan.groups:
        counted = {"name": "CAIRN_ATTEMPT", "value": str(attempt)}
        template = replicated_pod(plan, group, [counted])
        names = [f"{job.name}-{group.role}-0-{index}" for index in range(group.most)]
        objects += [_pod(plan, template, name, attempt) for name in names]
    return objects


def _pod(plan: JobPlan, template: Object, name: str, attempt: int) -> Object:
    spec = template["spec"] | {
        "hostname": name,
        "subdomain": plan.job.name,
        "activeDeadlineSeconds": math.ceil(plan.job.seconds),
    }
    marks = template["metadata"]["labels"] | {ATTEMPT: str(attempt)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": name, "labels": marks},
        "spec": spec,
    }
