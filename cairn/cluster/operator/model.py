"""The kind Model: weights on a volume of the cluster, fetched once, mounted by every server that uses them. Pure.

    Model --> PersistentVolumeClaim NAME-model, Job NAME-download (`hf download SOURCE` into it)

A server group says `model = "model:NAME"`. A Model that a service still uses stays until the service has gone.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cairn.cluster.backends.k8s_pod import USER
from cairn.cluster.operator.conditions import Condition
from cairn.cluster.operator.objects import Object
from cairn.cluster.operator.reconcile import (
    Action,
    Observed,
    RenderedObjects,
    ResourceHandler,
    read_spec,
    status_actions,
)

PREFIX = "model:"  # of the model of a server group that names a Model
FOLDER = "/models"  # where its volume is mounted


class ModelResourceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")]
    """a repository of Hugging Face's hub, such as Qwen/Qwen3-8B"""
    revision: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][\w./-]*$")] = "main"
    """a branch, a tag or a commit"""
    size: Annotated[str, Meta(pattern=r"^[0-9]+(Mi|Gi|Ti)$")] = "100Gi"
    """of the volume"""
    storage_class: str = ""
    """empty: the cluster's default"""
    access: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """ReadWriteOnce: all of its servers run on one node"""
    image: str = "cairn:cuda"
    secret: str = ""
    """of the namespace, with HF_TOKEN for a gated repository"""


def claim_name(name: str) -> str:
    return f"{name}-model"


def render(observed: Observed) -> RenderedObjects:
    spec = read_spec(observed, ModelResourceSpec)
    job = observed.child("Job", f"{observed.name}-download")
    return RenderedObjects(
        objects=[_claim(observed.name, spec), _download(observed.name, spec)],
        conditions=[_downloaded(job)],
        fields={"source": spec.source, "claim": claim_name(observed.name)},
    )


def release(observed: Observed) -> list[Action] | None:
    """Waits while a service uses it, and says so."""
    users = sorted(one["metadata"]["name"] for one in observed.related if uses(one, observed.name))
    if not users:
        return None
    said = f"used by {', '.join(users[:5])}"
    return status_actions(
        observed, [Condition(type="Unused", ok=False, reason="InUse", message=said)]
    )


def uses(service: Object, name: str) -> bool:
    servers = service.get("spec", {}).get("servers") or ()
    return any(group.get("model") == f"{PREFIX}{name}" for group in servers)


def _claim(name: str, spec: ModelResourceSpec) -> Object:
    asked: Object = {
        "accessModes": [spec.access],
        "resources": {"requests": {"storage": spec.size}},
    }
    if spec.storage_class:
        asked["storageClassName"] = spec.storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim_name(name)},
        "spec": asked,
    }


def _download(name: str, spec: ModelResourceSpec) -> Object:
    folder = f"{FOLDER}/{name}"
    container: Object = {
        "name": "download",
        "image": spec.image,
        "command": [
            *("hf", "download", spec.source),
            *("--revision", spec.revision),
            *("--local-dir", folder),
        ],
        "env": [{"name": "HF_HOME", "value": f"{FOLDER}/.cache"}],
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "models", "mountPath": FOLDER}],
    }
    if spec.secret:
        container["envFrom"] = [{"secretRef": {"name": spec.secret}}]
    volume = {"name": "models", "persistentVolumeClaim": {"claimName": claim_name(name)}}
    pod = {
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [volume],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{name}-download"},
        "spec": {"backoffLimit": 6, "template": {"spec": pod}},
    }


def _downloaded(job: Object | None) -> Condition:
    status = (job or {}).get("status", {})
    for one in status.get("conditions", []):
        if one["type"] == "Failed" and one["status"] == "True":
            said = one.get("message", "the download failed")
            return Condition(type="Downloaded", ok=False, reason="Failed", message=said)
    if status.get("succeeded"):
        return Condition(type="Downloaded", ok=True, reason="Downloaded")
    return Condition(type="Downloaded", ok=False, reason="Downloading")


MODEL = ResourceHandler(name="Model", render=render, release=release, related=("InferenceService",))
