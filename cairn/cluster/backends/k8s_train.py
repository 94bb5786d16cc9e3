"""A training job as objects of Kubernetes, in three forms. Pure.

    jobset    JobSet, admitted as a whole by Kueue where the job names a queue     (the default)
    volcano   Volcano Job: gang by minAvailable, nearness by network topology
    rayjob    RayJob of KubeRay: a Ray cluster for this one job, on which `cairn launch --on ray` runs it

Every pod of an elastic role runs one agent; they meet at the first pod, by its name in DNS.
"""

import math
from typing import Any

import msgspec

from cairn.cluster.backends.k8s_pod import (
    CHECKPOINTS,
    TOPOLOGY_KEYS,
    Object,
    affinity,
    container,
    disruption_budget,
    environment,
    keeps_files,
    labels,
    mounts,
    pod,
)
from cairn.cluster.elastic import Rendezvous, agent_argv, rank_argv
from cairn.cluster.job_file import job_json
from cairn.cluster.pod_agent import MISTAKE
from cairn.cluster.resolve import JobPlan, NodeGroup
from cairn.cluster.secret_env import without_secrets
from cairn.cluster.spec import Job, Topology

PORT = 29400
RAY_VERSION = "2.60.0"
CLUSTER_START_S = 600  # beyond the time of the job
JOB_FILE = "/etc/cairn/job.json"
TIERS = {"host": 1, "rack": 1, "block": 2}  # of Volcano's HyperNodes, from the leaf up
ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"


def jobset_objects(plan: JobPlan) -> list[Object]:
    job = plan.job
    meta: Object = {"name": job.name, "labels": {**labels(job, "all"), **_queued(job)}}
    restarts = 0 if job.restart.policy == "fail" else job.restart.max
    spec: Object = {
        "suspend": job.queue is not None,  # until Kueue admits all of it
        "network": {
            "enableDNSHostnames": True,
            "subdomain": job.name,
            "publishNotReadyAddresses": True,
        },
        "successPolicy": {"operator": "All"},
        "failurePolicy": {
            "maxRestarts": restarts,
            "restartStrategy": "BlockingRecreate",  # old pods have gone before new ones meet
            "rules": [
                {
                    "name": "mistake",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [_replicated(plan, group) for group in plan.groups],
        "ttlSecondsAfterFinished": 86400,
    }
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": meta,
            "spec": spec,
        },
        _never_drained(plan, plan.nodes),
    ]


def _never_drained(plan: JobPlan, pods: int) -> Object:
    """A gang that loses one pod starts again. As a number of pods: of these kinds Kubernetes knows no other."""
    return disruption_budget(plan.job, plan.job.name, None, minAvailable=pods)


def replicated_pod(plan: JobPlan, group: NodeGroup, env: list[Object]) -> Object:
    """The template of a role's pods, which meet at the first of them: JOB-ROLE-0-0 in the subdomain JOB."""
    job = plan.job
    endpoint = f"{job.name}-{group.role}-0-0.{job.name}:{PORT}"
    trainer = container(
        job, group, _command(job, group, endpoint), [*environment(job, group), *env]
    )
    return _placed(plan, group, trainer)


def _replicated(plan: JobPlan, group: NodeGroup) -> Object:
    job = plan.job
    attempt: Object = {
        "name": "CAIRN_ATTEMPT",
        "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{ATTEMPT}']"}},
    }
    template = replicated_pod(plan, group, [attempt])
    in_place = job.restart.policy in ("in_place", "shrink")
    return {
        "name": group.role,
        "replicas": 1,
        "template": {
            "spec": {
                "parallelism": group.most,
                "completions": group.most,
                "completionMode": "Indexed",
                "backoffLimit": job.restart.max if in_place else 0,
                "activeDeadlineSeconds": math.ceil(job.seconds),
                "podFailurePolicy": {"rules": _pod_failures(group)},
                **_enough(group),
                "template": template,
            }
        },
    }


def _enough(group: NodeGroup) -> Object:
    """Success policy of an elastic role: `least` pods suffice, because a pod that never joined cannot succeed."""
    if not group.elastic or group.least == group.most:
        return {}
    return {"successPolicy": {"rules": [{"succeededCount": group.least}]}}


def _placed(plan: JobPlan, group: NodeGroup, trainer: Object) -> Object:
    """The pod, with nearness and priority in Kueue's words where there is a queue, else in the scheduler's."""
    job = plan.job
    template = pod(plan, group, trainer, _nearness(job) if job.queue else None)
    near = affinity(job)
    if not job.queue:
        template["spec"] |= {"affinity": near} if near else {}
        template["spec"] |= {"priorityClassName": job.priority} if job.priority else {}
    return template


def _queued(job: Job) -> dict[str, str]:
    """The labels that give a job to Kueue."""
    if not job.queue:
        return {}
    priority = {"kueue.x-k8s.io/priority-class": job.priority} if job.priority else {}
    return {"kueue.x-k8s.io/queue-name": job.queue, **priority}


def _pod_failures(group: NodeGroup) -> list[Object]:
    mistake = {"containerName": group.role, "operator": "In", "values": [MISTAKE]}
    taken = [{"type": "DisruptionTarget", "status": "True"}]
    return [
        {"action": "FailJob", "onExitCodes": mistake},
        {
            "action": "Ignore",
            "onPodConditions": taken,
        },  # a drained node is no failure of the job
    ]


def _nearness(job: Job) -> dict[str, str] | None:
    """Annotations for Kueue's topology-aware scheduling."""
    if job.topology.required:
        return {"kueue.x-k8s.io/podset-required-topology": TOPOLOGY_KEYS[job.topology.required]}
    if job.topology.preferred:
        return {"kueue.x-k8s.io/podset-preferred-topology": TOPOLOGY_KEYS[job.topology.preferred]}
    return None


def _command(job: Job, group: NodeGroup, endpoint: str) -> list[str]:
    listening = ["python", "-m", "cairn.cluster.pod_agent", "--"]
    if not group.elastic:
        return [*listening, *rank_argv(group.argv, "python")]
    rendezvous = Rendezvous(endpoint=endpoint, run=f"{job.name}-{group.role}", hosted="")
    return [*listening, *agent_argv(job, group, rendezvous, None, "python")]


def volcano_objects(plan: JobPlan) -> list[Object]:
    job = plan.job
    action = {
        "in_place": "RestartPod",
        "shrink": "RestartPod",
        "requeue": "RestartJob",
        "fail": "AbortJob",
    }
    # With several roles the first that is done would end the others.
    completed = [{"event": "TaskCompleted", "action": "CompleteJob"}] * (len(plan.groups) == 1)
    spec: Object = {
        "schedulerName": "volcano",
        "minAvailable": sum(group.least for group in plan.groups) if job.gang else 1,
        "maxRetry": max(1, job.restart.max),
        "plugins": {"svc": [], "env": []},
        "policies": [
            {"exitCode": MISTAKE, "action": "AbortJob"},
            {"event": "PodEvicted", "action": "RestartJob"},
            {"event": "PodFailed", "action": action[job.restart.policy]},
            *completed,
        ],
        "tasks": [_task(plan, group) for group in plan.groups],
        "ttlSecondsAfterFinished": 86400,
    }
    if job.queue:
        spec["queue"] = job.queue
    if job.priority:
        spec["priorityClassName"] = job.priority
    level = job.topology.required or job.topology.preferred
    if level:
        mode = "hard" if job.topology.required else "soft"
        spec["networkTopology"] = {"mode": mode, "highestTierAllowed": TIERS[level]}
    volcano_job = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": job.name, "labels": labels(job, "all")},
        "spec": spec,
    }
    return [volcano_job, _never_drained(plan, plan.nodes)]


def _task(plan: JobPlan, group: NodeGroup) -> Object:
    job = plan.job
    endpoint = f"{job.name}-{group.role}-0.{job.name}:{PORT}"
    trainer = container(job, group, _command(job, group, endpoint), environment(job, group))
    template = pod(plan, group, trainer)
    template["spec"]["activeDeadlineSeconds"] = math.ceil(job.seconds)
    least = group.least if job.gang else 1
    return {"name": group.role, "replicas": group.most, "minAvailable": least, "template": template}


def rayjob_objects(plan: JobPlan) -> list[Object]:
    """The job file as a ConfigMap; a Ray cluster of its size; `cairn launch` as what is run on it."""
    job = plan.job
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-job", "labels": labels(job, "all")},
        "data": {"job.json": job_json(_inner_job(plan))},
    }
    meta: Object = {"name": job.name, "labels": {**labels(job, "all"), **_queued(job)}}
    restarts = job.restart.max if job.restart.policy == "requeue" else 0
    spec: Object = {
        "entrypoint": f"cairn launch {JOB_FILE} --on ray --address auto",
        "submissionMode": "K8sJobMode",
        "suspend": job.queue is not None,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 3600,
        "activeDeadlineSeconds": math.ceil(job.seconds) + CLUSTER_START_S,
        "backoffLimit": restarts,
        "rayClusterSpec": {
            "rayVersion": RAY_VERSION,
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _ray_head(plan)},
            "workerGroupSpecs": [_ray_workers(plan, group) for group in plan.groups],
        },
    }
    rayjob = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": meta, "spec": spec}
    return [config, rayjob, _never_drained(plan, plan.nodes + 1)]


def _inner_job(plan: JobPlan) -> Job:
    """The job on its own Ray cluster: alone there, so without what decides between jobs.

    Secrets come with the environment of the workers' pods.
    """
    job = plan.job
    roles = [
        msgspec.structs.replace(role, mig="", image=None, env=without_secrets(role.env))
        for role in job.roles
    ]
    inner = msgspec.structs.replace(
        job,
        env=without_secrets(job.env),
        queue=None,
        priority=None,
        image=None,
        topology=Topology(),
        roles=roles,
    )
    if any(keeps_files(job, group) for group in plan.groups):
        kept = msgspec.structs.replace(job.checkpoint, folder=job.checkpoint.folder or CHECKPOINTS)
        inner = msgspec.structs.replace(inner, checkpoint=kept)
    return inner


def _ray_head(plan: JobPlan) -> Object:
    group = plan.groups[0]
    env = [{"name": "CAIRN_JOBS", "value": "/tmp/cairn-jobs"}]
    head: Object = {
        "name": "ray-head",
        "image": group.image,
        "env": env,
        "ports": [
            {"containerPort": 6379, "name": "gcs"},
            {"containerPort": 8265, "name": "dashboard"},
        ],
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
        "volumeMounts": [{"name": "job", "mountPath": "/etc/cairn"}, *mounts(plan.job, group)],
    }
    template = _with_job(plan, pod(plan, group, head))
    if plan.job.priority and not plan.job.queue:
        template["spec"]["priorityClassName"] = plan.job.priority
    template["metadata"]["labels"]["cairn/role"] = "ray-head"
    return template


def _ray_workers(plan: JobPlan, group: NodeGroup) -> Object:
    worker: dict[str, Any] = container(plan.job, group, [], environment(plan.job, group))
    del worker["command"]  # KubeRay writes it
    return {
        "groupName": group.role,
        "replicas": group.most,
        "minReplicas": group.least,
        "maxReplicas": group.most,
        # KubeRay counts whole GPUs by itself, and no slices.
        "rayStartParams": {"num-gpus": str(group.gpus)} if group.mig else {},
        "template": _placed(plan, group, worker),
    }


def _with_job(plan: JobPlan, template: Object) -> Object:
    volume = {"name": "job", "configMap": {"name": f"{plan.job.name}-job"}}
    template["spec"]["volumes"].append(volume)
    return template
