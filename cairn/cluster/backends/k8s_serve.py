"""A server as objects of Kubernetes: copies behind one address, more of them when requests wait. Pure.

    one node each      Deployment            \\
    several nodes      LeaderWorkerSet        >  Service, PodDisruptionBudget, HPA or KEDA ScaledObject

What is scaled on is what the server counts itself (`cairn metrics list`); for the HorizontalPodAutoscaler Prometheus's
adapter has to offer it, KEDA asks Prometheus itself.
"""

import math

from cairn.cluster.backends.k8s_pod import (
    TOPOLOGY_KEYS,
    Object,
    container,
    disruption_budget,
    environment,
    labels,
    pod,
)
from cairn.cluster.elastic import rank_argv
from cairn.cluster.resolve import JobPlan, NodeGroup
from cairn.cluster.spec import Job
from cairn.core.units import parse_duration

PROMETHEUS = "http://prometheus.monitoring.svc:9090"
LOADING_S = 1800  # a large model may take that long before it answers
DRAIN_S = 30  # how long `cairn serve` lets requests finish, by default
SLOW_DOWN_S = 300  # copies are taken away only after so long a calm


def serving_objects(plan: JobPlan) -> list[Object]:
    job = plan.job
    group = plan.groups[0]
    target = _leader_worker_set(plan, group) if group.most > 1 else _deployment(plan, group)
    objects = [target, _service(plan, group)]
    if job.scale.most > 1:
        objects.append(disruption_budget(job, job.name, None, maxUnavailable=1))
    if job.scale.most > job.scale.least:
        kind = {"apiVersion": target["apiVersion"], "kind": target["kind"], "name": job.name}
        objects.append(_keda(plan, kind) if job.scale.actuator == "keda" else _hpa(plan, kind))
    return objects


def _server(plan: JobPlan, group: NodeGroup) -> Object:
    """The pod that answers. Probes are tied to the engine's steps.

    While an engine is started again, its pod gets no requests, and is not killed over it: to load a model may take
    longer than a liveness probe has patience.
    """
    job = plan.job
    server = container(job, group, rank_argv(group.argv, "python"), environment(job, group))
    health = {"httpGet": {"path": "/health", "port": "http"}}
    server |= {
        "ports": [{"name": "http", "containerPort": job.port}],
        "startupProbe": {**health, "periodSeconds": 5, "failureThreshold": LOADING_S // 5},
        "readinessProbe": {**health, "periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {
            "httpGet": {"path": "/live", "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }
    scraped = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(job.port),
        "prometheus.io/path": "/metrics",
    }
    template = pod(plan, group, server, scraped)
    template["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": TOPOLOGY_KEYS["host"],
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"cairn/job": job.name}},
        }
    ]
    template["spec"]["terminationGracePeriodSeconds"] = _grace(job)
    if job.priority:
        template["spec"]["priorityClassName"] = job.priority
    return template


def _deployment(plan: JobPlan, group: NodeGroup) -> Object:
    job = plan.job
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": job.name, "labels": _labels(plan, group)},
        "spec": {
            "replicas": job.scale.least,
            "selector": {"matchLabels": {"cairn/job": job.name, "cairn/role": group.role}},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": _server(plan, group),
        },
    }


def _labels(plan: JobPlan, group: NodeGroup) -> dict[str, str]:
    """Kueue admits servers, too."""
    queue = {"kueue.x-k8s.io/queue-name": plan.job.queue} if plan.job.queue else {}
    return {**labels(plan.job, group.role), **queue}


def _leader_worker_set(plan: JobPlan, group: NodeGroup) -> Object:
    """LeaderWorkerSet: a replica is several pods that start and fail together; the leader serves requests."""
    job = plan.job
    leader = _server(plan, group)
    command = rank_argv(group.argv, "python")
    worker = pod(plan, group, container(job, group, command, environment(job, group)))
    leader["metadata"]["labels"]["cairn/role"] = "leader"
    for template in (leader, worker):
        template["spec"]["terminationGracePeriodSeconds"] = _grace(job)
        template["spec"]["containers"][0]["env"] += _place_in_group(group)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": job.name, "labels": _labels(plan, group)},
        "spec": {
            "replicas": job.scale.least,
            "leaderWorkerTemplate": {
                "size": group.most,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader,
                "workerTemplate": worker,
            },
        },
    }


def _grace(job: Job) -> int:
    """A server that is stopped finishes what it answers first."""
    return max(DRAIN_S, math.ceil(parse_duration(job.restart.grace))) + 15


def _place_in_group(group: NodeGroup) -> list[Object]:
    """Environment variables for {rank} and {world}; $LWS_LEADER_ADDRESS is set by the controller."""
    index = {
        "fieldRef": {"fieldPath": "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}
    }
    count = [
        {"name": name, "value": str(group.most)} for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE")
    ]
    return [{"name": "RANK", "valueFrom": index}, *count]


def _service(plan: JobPlan, group: NodeGroup) -> Object:
    job = plan.job
    role = "leader" if group.most > 1 else group.role
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name, "labels": labels(job, group.role)},
        "spec": {
            "selector": {"cairn/job": job.name, "cairn/role": role},
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def _hpa(plan: JobPlan, target: Object) -> Object:
    job = plan.job
    metric = {
        "metric": {"name": job.scale.metric},
        "target": {"type": "AverageValue", "averageValue": f"{job.scale.target:g}"},
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": job.name, "labels": {"cairn/job": job.name}},
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": job.scale.least,
            "maxReplicas": job.scale.most,
            "metrics": [{"type": "Pods", "pods": metric}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": SLOW_DOWN_S}},
        },
    }


def _keda(plan: JobPlan, target: Object) -> Object:
    job = plan.job
    query = f'sum({job.scale.metric}{{pod=~"{job.name}-.*"}})'
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": job.name, "labels": {"cairn/job": job.name}},
        "spec": {
            "scaleTargetRef": target,
            "minReplicaCount": job.scale.least,
            "maxReplicaCount": job.scale.most,
            "cooldownPeriod": SLOW_DOWN_S,
            "triggers": [
                {
                    "type": "prometheus",
                    "metadata": {
                        "serverAddress": PROMETHEUS,
                        "query": query,
                        "threshold": f"{job.scale.target:g}",
                    },
                }
            ],
        },
    }
