"""Objects of Kubernetes as plain dictionaries: names, owners, digests; is a live object as it should be? Pure.

A live object has more than was applied (defaults, status, other managers' fields). `covers` asks whether everything
that was applied is still there; the digest annotation tells when something that was applied before is not any more.
"""

import hashlib
from collections.abc import Collection
from typing import Any

import msgspec

from cairn.cluster.backends.kubernetes import quantity

Object = dict[str, Any]

GROUP, VERSION = "cairn.dev", "v1alpha1"
API = f"{GROUP}/{VERSION}"
MANAGER = "cairn-operator"  # the field manager of server-side apply
DIGEST = f"{GROUP}/digest"
MANAGED = f"{GROUP}/managed-by"  # label by which children are watched
IMMUTABLE = ("Pod", "Job")  # changed by deleting and making them again
POOL_API = "inference.networking.k8s.io/v1"  # of an InferencePool
KEDA_API = "keda.sh/v1alpha1"  # of a ScaledObject
BUDGETS = ("policy/v1", "policy/v1beta1")
WRITE_ONLY = ("stringData",)  # of a Secret: the API keeps it in another form
MERGE_KEYS = ("uid", "name", "type", "containerPort", "port", "key")


class Ref(msgspec.Struct, frozen=True, order=True):
    """Reference to an object; `api` is group/version, as in apiVersion."""

    api: str
    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def ref_of(obj: Object) -> Ref:
    meta = obj["metadata"]
    return Ref(obj["apiVersion"], obj["kind"], meta.get("namespace", ""), meta["name"])


def plural(kind: str) -> str:
    """Plural resource name of a kind in API paths."""
    return f"{kind.lower()}s"


def owner_of(obj: Object) -> Ref | None:
    """The object of ours that controls this one."""
    meta = obj["metadata"]
    for owner in meta.get("ownerReferences") or ():
        if owner.get("controller") and owner["apiVersion"] == API:
            return Ref(API, owner["kind"], meta.get("namespace", ""), owner["name"])
    return None


def is_owned_by(obj: Object, uid: str) -> bool:
    owners = obj["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner["uid"] == uid for owner in owners)


def owned(obj: Object, owner: Object) -> Object:
    """`obj` as it is applied: in the owner's namespace, deleted with it, with a digest of what was wanted."""
    meta = obj["metadata"]
    digest = hashlib.sha256(msgspec.json.encode(obj, order="deterministic")).hexdigest()[:16]
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return obj | {
        "metadata": meta
        | {
            "namespace": owner["metadata"]["namespace"],
            "labels": meta.get("labels", {}) | {MANAGED: MANAGER},
            "annotations": meta.get("annotations", {}) | {DIGEST: digest},
            "ownerReferences": [reference],
        }
    }


def as_known(objects: list[Object], apis: Collection[str]) -> list[Object]:
    """The objects in the versions that a cluster has, without those of kinds that it does not know.

    Budgets were v1beta1 before Kubernetes 1.21; pools are there where a gateway was installed. Without KEDA what it
    would scale has its least number, and at least one.
    """
    budget = next((one for one in BUDGETS if f"{one}/PodDisruptionBudget" in apis), None)
    known = {"PodDisruptionBudget": budget}
    known["InferencePool"] = POOL_API if f"{POOL_API}/InferencePool" in apis else None
    known["ScaledObject"] = KEDA_API if f"{KEDA_API}/ScaledObject" in apis else None
    if known["ScaledObject"] is None:
        objects = _with_fixed_numbers(objects)
    return [
        one | {"apiVersion": known.get(one["kind"], one["apiVersion"])}
        for one in objects
        if known.get(one["kind"], one["apiVersion"])
    ]


def _with_fixed_numbers(objects: list[Object]) -> list[Object]:
    scaled = [one["spec"] for one in objects if one["kind"] == "ScaledObject"]
    least = {one["scaleTargetRef"]["name"]: max(one["minReplicaCount"], 1) for one in scaled}
    return [
        one | {"spec": one["spec"] | {"replicas": least[one["metadata"]["name"]]}}
        if one["kind"] == "Deployment" and one["metadata"]["name"] in least
        else one
        for one in objects
    ]


def is_current(live: Object, wanted: Object) -> bool:
    """Nothing has to be written: the same was applied before, and it was not changed since."""
    applied = live["metadata"].get("annotations", {}).get(DIGEST)
    if applied != wanted["metadata"]["annotations"][DIGEST]:
        return False
    return wanted["kind"] in IMMUTABLE or covers(live, wanted)


def covers(live: Any, wanted: Any) -> bool:
    """Everything of `wanted` is in `live`; the API writes quantities in its own way, and others may add entries."""
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(
            covers(live.get(key), value) for key, value in wanted.items() if key not in WRITE_ONLY
        )
    if isinstance(wanted, list):
        return isinstance(live, list) and _covers_list(live, wanted)
    return live == wanted or _same_quantity(live, wanted)


def _covers_list(live: list[Any], wanted: list[Any]) -> bool:
    key = _merge_key(wanted)
    if key is None:
        return len(live) == len(wanted) and all(map(covers, live, wanted))
    entries = {one.get(key): one for one in live if isinstance(one, dict)}
    return all(one[key] in entries and covers(entries[one[key]], one) for one in wanted)


def _merge_key(wanted: list[Any]) -> str | None:
    """The field that names the entries of a list; None: entries are compared in order."""
    if not wanted or not all(isinstance(one, dict) for one in wanted):
        return None
    return next((key for key in MERGE_KEYS if all(key in one for one in wanted)), None)


def _same_quantity(live: Any, wanted: Any) -> bool:
    """`1000m` and `1`, `1024Mi` and `1Gi`."""
    if not isinstance(live, str | int) or not isinstance(wanted, str | int):
        return False
    try:
        return quantity(str(live)) == quantity(str(wanted))
    except ValueError:
        return False
