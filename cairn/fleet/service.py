"""The kind InferenceService: a fleet file as an object of Kubernetes, and what the operator makes of it. Pure.

    InferenceService --> router (ConfigMap, Deployment, Service); each group: Deployment, headless Service, budget
    deleted          --> no new clients, then the router's last answers, then the servers', then gone

`kubectl scale` and autoscalers (HPA, KEDA) act on `spec.replicas`, which is the count of the first group.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from cairn.cluster.operator.conditions import Condition, available
from cairn.cluster.operator.crd import CelRule, Definition
from cairn.cluster.operator.model import PREFIX
from cairn.cluster.operator.objects import API, Object, ref_of
from cairn.cluster.operator.reconcile import (
    Action,
    MergePatch,
    Observed,
    RenderedObjects,
    ResourceHandler,
    alive,
    delete,
    read_spec,
)
from cairn.fleet.apply import changed_fields, check_for, objects_of
from cairn.fleet.config import FleetConfig


class ServiceScale(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of an InferenceService in addition to those of a fleet file."""

    replicas: Annotated[int, Meta(ge=0, le=1024)] | None = None
    """servers of the first group, instead of its count; within its least and most, and in place of KEDA"""


def render(observed: Observed) -> RenderedObjects:
    config = read_service(observed)
    check_for(config, "kubernetes")
    missing = _models(observed, config)
    objects = objects_of(config, observed.resource["metadata"]["namespace"])
    deployments = [one["metadata"]["name"] for one in objects if one["kind"] == "Deployment"]
    parts = [
        available(_condition_name(name, observed.name), observed.child("Deployment", name))
        for name in deployments
    ]
    first = observed.child("Deployment", f"{observed.name}-servers-{_first(config)}") or {}
    fields = {
        "replicas": first.get("status", {}).get("replicas", 0),
        "selector": f"cairn/fleet={observed.name},cairn/part={observed.name}-servers-{_first(config)}",
        "url": f"http://{observed.name}.{observed.resource['metadata']['namespace']}",
    }
    return RenderedObjects(
        objects=None if missing else objects, conditions=[*missing, *parts], fields=fields
    )


def read_service(observed: Observed) -> FleetConfig:
    """The fleet that the spec says, with the replicas that an autoscaler may have set."""
    spec = observed.resource.get("spec", {})
    replicas = spec.get("replicas")
    without = msgspec.structs.replace(
        observed,
        resource=observed.resource | {"spec": {k: v for k, v in spec.items() if k != "replicas"}},
    )
    config = read_spec(without, FleetConfig, name=observed.name)
    if replicas is None:
        return config
    first = _first(config)
    group = config.servers[first]
    least = group.least if group.least is not None else 0
    count = max(least, min(int(replicas), group.most or int(replicas)))
    servers = list(config.servers)  # whoever sets the number takes KEDA's place
    servers[first] = msgspec.structs.replace(group, count=count, least=None, most=None)
    return msgspec.structs.replace(config, servers=servers)


def _first(config: FleetConfig) -> int:
    started = (at for at, group in enumerate(config.servers) if group.model)
    return next(started, 0)


def _models(observed: Observed, config: FleetConfig) -> list[Condition]:
    """A condition for what it refers to, while that is not there; servers that run already stay."""
    ready = {one["metadata"]["name"] for one in observed.related if _is_ready(one)}
    known = {one["metadata"]["name"] for one in observed.related}
    models = [group.model for group in config.servers if group.model.startswith(PREFIX)]
    for name in (model.removeprefix(PREFIX) for model in models):
        if name not in ready:
            reason = "Waiting" if name in known else "Missing"
            said = f"Model {name} " + ("is not ready" if name in known else "does not exist")
            return [Condition(type="ModelsReady", ok=False, reason=reason, message=said)]
    return []


def _is_ready(model: Object) -> bool:
    conditions = (model.get("status") or {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _condition_name(deployment: str, service: str) -> str:
    """chat-servers-0 of chat is Servers0Ready."""
    words = deployment.removeprefix(f"{service}-").split("-")
    return "".join(word.capitalize() for word in words) + "Ready"


def release(observed: Observed) -> list[Action] | None:
    """Clients first, then the router, then the servers; each step is seen before the next begins.

    KEDA's objects end with the clients' Service: it would bring back servers that go.
    """
    clients = ("Service", observed.name)
    fronts = [
        one
        for one in observed.children
        if one["kind"] == "ScaledObject" or (one["kind"], one["metadata"]["name"]) == clients
        if alive(one)
    ]
    if fronts:
        return [delete(one) for one in fronts]
    router = observed.child("Deployment", f"{observed.name}-router")
    servers = [
        one for one in observed.children if one["kind"] == "Deployment" and one is not router
    ]
    for stage in ([router] if router else [], servers):
        running = [one for one in stage if alive(one) and not _is_down(one)]
        if running:
            return [_down(one) for one in running if one["spec"].get("replicas", 1) != 0]
    return None


def _is_down(deployment: Object) -> bool:
    status, meta = deployment.get("status", {}), deployment["metadata"]
    is_newest = status.get("observedGeneration", 0) >= meta.get("generation", 0)
    return deployment["spec"].get("replicas", 1) == 0 and is_newest and not status.get("replicas")


def _down(deployment: Object) -> MergePatch:
    version = deployment["metadata"]["resourceVersion"]
    patch = {"metadata": {"resourceVersion": version}, "spec": {"replicas": 0}}
    return MergePatch(ref_of(deployment), patch)


def service_object(config: FleetConfig) -> Object:
    """InferenceService object: the file without its name and default values."""
    spec: Object = {"image": config.image}
    if config.inference_pool:
        spec["inference_pool"] = True
    if router := changed_fields(config.router):
        spec["router"] = router
    for name in ("servers", "aliases", "keys"):
        if parts := getattr(config, name):
            spec[name] = [changed_fields(part) for part in parts]
    meta = {"name": config.name}
    return {"apiVersion": API, "kind": "InferenceService", "metadata": meta, "spec": spec}


INFERENCE_SERVICE = ResourceHandler(
    name="InferenceService", render=render, release=release, related=("Model",)
)
DEFINITION = Definition(
    kind="InferenceService",
    short="cisvc",
    spec=FleetConfig,
    more=ServiceScale,
    without=("name",),
    rules=(
        CelRule("", "size(self.servers) > 0", "servers is empty: a service has at least one group"),
        CelRule(
            "servers[]",
            "(has(self.model) && self.model != '' ? 1 : 0) + (has(self.dns) && self.dns != '' ? 1 : 0)"
            " + (has(self.urls) && size(self.urls) > 0 ? 1 : 0) == 1",
            "a group has exactly one of model, urls and dns",
        ),
        CelRule(
            "servers[]",
            "has(self.least) == has(self.most) && (!has(self.least) || self.least <= self.most)",
            "least and most are given together, and least <= most",
        ),
    ),
    limits=(("servers", 64), ("aliases", 256), ("keys", 1024)),
    status={
        "replicas": {"type": "integer"},
        "selector": {"type": "string"},
        "url": {"type": "string"},
    },
    columns=(("Replicas", ".status.replicas"), ("URL", ".status.url")),
    scale={
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    },
)
