"""Conditions of a status: one for each part, and Ready, which is true when all others are. Pure.

Valid       the spec can be read              RouterReady, Servers0Ready ...   a child does its work
ModelsReady what it refers to is there        Ready                            all of them
"""

import msgspec

from cairn.cluster.operator.objects import Object

READY = "Ready"


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    ok: bool | None  # None: not known yet
    reason: str  # CamelCase, for machines
    message: str = ""

    @property
    def status(self) -> str:
        return {True: "True", False: "False", None: "Unknown"}[self.ok]


def roll_up(parts: list[Condition]) -> Condition:
    """Ready: the first part that is not decides the reason."""
    for part in parts:
        if not part.ok:
            said = f"{part.type}: {part.message or part.reason}"
            return Condition(type=READY, ok=part.ok, reason=part.reason, message=said)
    return Condition(type=READY, ok=True, reason="Ready")


def written(
    parts: list[Condition], before: list[Object], generation: int, now: str
) -> list[Object]:
    """The conditions as the API has them; the time of one changes only with its status."""
    old = {one["type"]: one for one in before}
    conditions = []
    for part in [*parts, roll_up(parts)]:
        last = old.get(part.type, {})
        same = last.get("status") == part.status
        conditions.append(
            {
                "type": part.type,
                "status": part.status,
                "reason": part.reason,
                "message": part.message or part.reason,  # some servers make null of an empty one
                "observedGeneration": generation,
                "lastTransitionTime": last["lastTransitionTime"] if same else now,
            }
        )
    return conditions


def available(type_: str, live: Object | None) -> Condition:
    """Condition: all replicas of a Deployment run the newest template."""
    if live is None:
        return Condition(type=type_, ok=False, reason="Missing", message="it is being created")
    status, wanted = live.get("status", {}), live["spec"].get("replicas", 1)
    ready = status.get("availableReplicas", 0)
    fresh = status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
    updated = status.get("updatedReplicas", 0) >= wanted
    done = fresh and updated and ready >= wanted
    for one in status.get("conditions", []):
        if one["type"] == "Progressing" and one.get("reason") == "ProgressDeadlineExceeded":
            said = f"{one['message']}; see {_pods_of(live)}"
            return Condition(type=type_, ok=False, reason=one["reason"], message=said)
    said = f"{ready} of {wanted} replicas"
    if done:
        return Condition(type=type_, ok=True, reason="Available", message=said)
    # Why a pod does not run (an image that is missing, no node with a free GPU) is in the pods alone.
    return Condition(
        type=type_, ok=False, reason="Progressing", message=f"{said}; see {_pods_of(live)}"
    )


def _pods_of(deployment: Object) -> str:
    labels = deployment["spec"]["selector"]["matchLabels"]
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    return f"kubectl describe pods -n {deployment['metadata']['namespace']} -l {selector}"
