"""A node of a job as a pod: resources, environment, topology, and no more rights than it needs. Pure.

Knows neither who makes the pod (`k8s_train`, `k8s_serve`) nor whether there is a cluster.
"""

import math
from typing import Any

from cairn.cluster.elastic import agent_env
from cairn.cluster.resolve import JobPlan, NodeGroup
from cairn.cluster.secret_env import secrets_in
from cairn.cluster.spec import Job
from cairn.core.units import parse_duration

Object = dict[str, Any]

# Which label of a node says where it is, as Kueue's documentation has them.
TOPOLOGY_KEYS = {
    "block": "cloud.provider.com/topology-block",
    "rack": "cloud.provider.com/topology-rack",
    "host": "kubernetes.io/hostname",
}
CHECKPOINTS = "/checkpoints"
CLAIM = "cairn-checkpoints"  # the volume claim that keeps them
USER = 10001  # of the image


def labels(job: Job, role: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": job.name,
        "app.kubernetes.io/managed-by": "cairn",
        "cairn/job": job.name,
        "cairn/role": role,
    }


def resources(group: NodeGroup) -> Object:
    """CPUs and memory are asked for; memory and GPUs are limits, too: neither can be shared."""
    requests = {
        "cpu": f"{math.ceil(group.cpus * 1000)}m",
        "memory": f"{math.ceil(group.memory / (1 << 20))}Mi",
    }
    limits = {"memory": requests["memory"]}
    if group.gpus:
        name = f"nvidia.com/mig-{group.mig}" if group.mig else "nvidia.com/gpu"
        limits[name] = str(group.gpus)
        requests[name] = str(group.gpus)
    return {"requests": requests, "limits": limits}


def environment(job: Job, group: NodeGroup) -> list[Object]:
    env = agent_env(job, group, folder=CHECKPOINTS, loopback=False)
    hidden = secrets_in(group.env)
    named: list[Object] = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": _secret(job, group), "key": name}}}
        if name in hidden
        else {"name": name, "value": literal(value)}
        for name, value in sorted(env.items())
    ]
    own = {"fieldRef": {"fieldPath": "metadata.name"}}
    return [*named, {"name": "CAIRN_NODE", "valueFrom": own}]


def secret_objects(plan: JobPlan) -> list[Object]:
    """Tokens and passwords of the job's environment, one Secret for each role that has some."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": _secret(plan.job, group),
                "labels": labels(plan.job, group.role),
            },
            "type": "Opaque",
            "stringData": hidden,
        }
        for group in plan.groups
        if (hidden := secrets_in(group.env))
    ]


def _secret(job: Job, group: NodeGroup) -> str:
    return f"{job.name}-{group.role}-env"


def literal(word: str) -> str:
    """The kubelet fills in $(NAME), and makes one $ of two; words are meant as they stand, as on every engine."""
    return word.replace("$", "$$")


def keeps_files(job: Job, group: NodeGroup) -> bool:
    """Return whether the job stores files. If so, its pods share one volume, with a folder for each job."""
    filled = any("{folder}" in word for word in (*group.argv, *group.env.values()))
    return job.checkpoint.folder is not None or filled


def mounts(job: Job, group: NodeGroup) -> list[Object]:
    shared = [{"name": "shm", "mountPath": "/dev/shm"}]
    if keeps_files(job, group):
        folder = job.checkpoint.folder or CHECKPOINTS
        shared.append({"name": "checkpoints", "mountPath": folder, "subPath": job.name})
    return shared


def container(job: Job, group: NodeGroup, command: list[str], env: list[Object]) -> Object:
    return {
        "name": group.role,
        "image": group.image,
        "command": [literal(word) for word in command],
        "env": env,
        "resources": resources(group),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts(job, group),
    }


def pod(
    plan: JobPlan,
    group: NodeGroup,
    main_container: Object,
    annotations: dict[str, str] | None = None,
) -> Object:
    """A pod template; `made` is its container."""
    job = plan.job
    volumes: list[Object] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if keeps_files(job, group):
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": CLAIM}})
    spec: Object = {
        "restartPolicy": "Always" if job.kind == "serve" else "Never",
        "terminationGracePeriodSeconds": math.ceil(parse_duration(job.restart.grace)) + 20,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # whose variables could look like settings
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [main_container],
        "volumes": volumes,
    }
    if group.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    metadata: Object = {"labels": labels(job, group.role)}
    if annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": spec}


def affinity(job: Job) -> Object | None:
    """Nearness for a scheduler that knows nothing better: pods of a job attract each other."""
    near = {"labelSelector": {"matchLabels": {"cairn/job": job.name}}}
    if job.topology.required:
        term = {**near, "topologyKey": TOPOLOGY_KEYS[job.topology.required]}
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    if job.topology.preferred:
        term = {**near, "topologyKey": TOPOLOGY_KEYS[job.topology.preferred]}
        weighted = [{"weight": 100, "podAffinityTerm": term}]
        return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": weighted}}
    return None


def disruption_budget(job: Job, name: str, role: str | None, **allowed: int) -> Object:
    selector = {"cairn/job": job.name} | ({"cairn/role": role} if role else {})
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "labels": {"cairn/job": job.name}},
        "spec": {**allowed, "selector": {"matchLabels": selector}},
    }
