"""Leader election between operators with a Lease. Pure; `leader` writes the decisions.

A holder renews three times within the Lease's duration; another takes it when it has seen no change for that long by
its own clock, so clocks of two machines are never compared. Writes carry the resourceVersion: of two that take it at
once, one wins.
"""

import datetime
from typing import Literal

import msgspec

from cairn.cluster.operator.objects import Object, Ref

DURATION_S = 10  # of a Lease that does not say
API, KIND = "coordination.k8s.io/v1", "Lease"

Step = Literal["renew", "take", "wait"]


class LeaseView(msgspec.Struct):
    """A candidate's view of the Lease: its last version, and the time of its last change."""

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
    lease: Ref, me: str, before: Object | None, step: Step, now: datetime.datetime, duration_s: int
) -> Object:
    """The Lease as the holder writes it."""
    stamp = now.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    old = (before or {}).get("spec") or {}
    taken = old.get("leaseTransitions", 0) + (step == "take" and before is not None)
    meta: Object = {"name": lease.name, "namespace": lease.namespace}
    if before:
        meta["resourceVersion"] = before["metadata"]["resourceVersion"]
    return {
        "apiVersion": API,
        "kind": KIND,
        "metadata": meta,
        "spec": {
            "holderIdentity": me,
            "leaseDurationSeconds": duration_s,
            "acquireTime": stamp if step == "take" else old.get("acquireTime", stamp),
            "renewTime": stamp,
            "leaseTransitions": taken,
        },
    }
