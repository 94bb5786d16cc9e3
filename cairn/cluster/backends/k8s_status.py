"""Job status from Kubernetes objects. Pure: reads the objects that kubectl prints.

JobSet, Volcano Job, RayJob, Deployment, LeaderWorkerSet + their pods (+ Kueue's Workloads)  ->  Status
"""

from typing import Any

from cairn.cluster.records import JobStatus, State

Object = dict[str, Any]

# What a container waits for, and what that means.
WAITING = {
    "ImagePullBackOff": "the image {image} cannot be pulled",
    "ErrImagePull": "the image {image} cannot be pulled",
    "InvalidImageName": "the image {image} has no valid name",
    "CrashLoopBackOff": "its program ends again and again",
    "CreateContainerConfigError": "its configuration is not there: {message}",
}
VOLCANO: dict[str, State] = {
    "Pending": "queued",
    "Inqueue": "queued",
    "Running": "running",
    "Restarting": "restarting",
    "Completing": "running",
    "Completed": "done",
    "Failed": "failed",
    "Aborted": "stopped",
    "Aborting": "stopped",
    "Terminated": "failed",
    "Terminating": "stopped",
}
RAY: dict[str, State] = {
    "": "queued",
    "Initializing": "starting",
    "Running": "running",
    "Complete": "done",
    "Failed": "failed",
    "Suspending": "queued",
    "Suspended": "queued",
    "Waiting": "queued",
    "Retrying": "restarting",
}


def status_of(resource: Object, pods: list[Object], workloads: list[Object]) -> JobStatus:
    """`made` is the object that was submitted, as the cluster has it now."""
    state, reason = _state(resource, pods)
    running = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
    if state in ("queued", "starting"):
        reason = _held_by_kueue(workloads) or _held_by_a_pod(pods) or reason
    restarts = int(resource.get("status", {}).get("restarts", 0) or 0)
    return JobStatus(state=state, reason=reason, nodes=running, restarts=restarts)


def _state(resource: Object, pods: list[Object]) -> tuple[State, str]:
    status = resource.get("status", {})
    match resource["kind"]:
        case "Job":
            phase = status.get("state", {})
            word = phase.get("phase", "Pending")
            return VOLCANO.get(word, "queued"), phase.get(
                "message"
            ) or f"Volcano says {word.lower()}"
        case "RayJob":
            word = status.get("jobDeploymentStatus", "")
            return RAY.get(word, "queued"), status.get(
                "message"
            ) or f"KubeRay says {word.lower() or 'nothing yet'}"
        case "Deployment" | "LeaderWorkerSet":
            ready, replicas = status.get("readyReplicas", 0), resource["spec"].get("replicas", 1)
            return ("running" if ready else "starting"), f"{ready} of {replicas} copies answer"
    return _jobset(status, pods)


def _jobset(status: Object, pods: list[Object]) -> tuple[State, str]:
    for condition in status.get("conditions", []):
        if condition.get("status") == "True":
            message = condition.get("message") or condition.get("reason", "")
            match condition["type"]:
                case "Completed":
                    return "done", "all pods finished"
                case "Failed":
                    return "failed", message
                case "Suspended":
                    return "queued", "waits for its queue"
    running = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
    if pods and running == len(pods):
        return "running", f"{running} pods"
    return ("starting" if pods else "queued"), f"{running} of {len(pods)} pods run"


def _held_by_kueue(workloads: list[Object]) -> str | None:
    for workload in workloads:
        for condition in workload.get("status", {}).get("conditions", []):
            if condition["type"] == "QuotaReserved" and condition["status"] == "False":
                return (
                    f"waits in its queue: {condition.get('message', condition.get('reason', ''))}"
                )
    return None


def _held_by_a_pod(pods: list[Object]) -> str | None:
    for pod in pods:
        status = pod.get("status", {})
        for container in status.get("containerStatuses", []):
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in WAITING:
                words = WAITING[waiting["reason"]]
                return words.format(
                    image=container.get("image", "?"), message=waiting.get("message", "")
                )
        for condition in status.get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f"cannot be placed: {condition.get('message', condition.get('reason', ''))}"
    return None
