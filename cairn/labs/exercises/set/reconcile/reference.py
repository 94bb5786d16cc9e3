"""From what is to what is wanted."""

from dataclasses import dataclass

Action = tuple[
    str, str
]  # ("create" | "delete", pod) or ("status", phase of the job) or ("restart", "")


@dataclass(frozen=True)
class Job:
    name: str
    size: int
    max_restarts: int
    restarts: int = 0
    deleting: bool = False


def reconcile(job: Job, pods: dict[str, str]) -> list[Action]:
    """Actions for pods in phases Pending, Running, Succeeded or Failed; an empty list when all is well."""
    # begin answer
    everything = [("delete", name) for name in sorted(pods)]
    if job.deleting:
        return everything
    desired = [f"{job.name}-{index}" for index in range(job.size)]
    if all(pods.get(name) == "Succeeded" for name in desired):
        return [("status", "Succeeded")]
    if any(phase == "Failed" for phase in pods.values()):
        if job.restarts >= job.max_restarts:
            return [("status", "Failed"), *everything]
        return [("restart", ""), *everything]
    extra = [("delete", name) for name in sorted(pods) if name not in desired]
    return extra + [("create", name) for name in desired if name not in pods]
    # end answer
