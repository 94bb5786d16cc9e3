"""Which of several operators acts: the one that holds a Lease. Pure; `run` writes what is decided here.

A holder renews every RENEW_S; another takes the Lease when it has seen no change of it for DURATION_S by its own clock,
so clocks of two machines are never compared. Writes carry the resourceVersion: of two that take it at once, one wins.
"""

import datetime
from typing import Literal

import msgspec

from cairn.cluster.operator.objects import Object

DURATION_S = 10
RENEW_S = 3.0
API, KIND = "coordination.k8s.io/v1", "Lease"

Step = Literal["renew", "take", "wait"]


class LeaseView(msgspec.Struct):
    """What one candidate has seen of the Lease, and since when it has not changed."""

    me: str
    version: str = ""
    since_s: float = 0.0

    def step(self, lease: Object | None, now_s: float) -> Step:
        version = lease["metadata"]["resourceVersion"] if lease else ""
        if version != self.version:
            self.version, self.since_s = version, now_s
        if lease is None:
            return "take"
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") == self.me:
            return "renew"
        given_up = not spec.get("holderIdentity")
        late = now_s - self.since_s >= spec.get("leaseDurationSeconds", DURATION_S)
        return "take" if given_up or late else "wait"


def lease_of(
    name: str, namespace: str, me: str, before: Object | None, step: Step, now: datetime.datetime
) -> Object:
    """The Lease as the holder writes it."""
    stamp = now.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    old = (before or {}).get("spec") or {}
    taken = old.get("leaseTransitions", 0) + (step == "take" and before is not None)
    meta: Object = {"name": name, "namespace": namespace}
    if before:
        meta["resourceVersion"] = before["metadata"]["resourceVersion"]
    return {
        "apiVersion": API,
        "kind": KIND,
        "metadata": meta,
        "spec": {
            "holderIdentity": me,
            "leaseDurationSeconds": DURATION_S,
            "acquireTime": stamp if step == "take" else old.get("acquireTime", stamp),
            "renewTime": stamp,
            "leaseTransitions": taken,
        },
    }
