"""Reconciliation: the actions that bring the cluster to an object's desired state. Pure: no API, no clock.

    Observed (the object, its children, what it refers to) --Kind.render--> Rendered --reconcile--> actions

Level-triggered: only what is seen counts, never the event that was the reason to look. Actions are ordered so that a
crash after any of them is mended by the next call, and a call on a cluster that is as it should be gives none.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from cairn.cluster.operator.conditions import Condition, written
from cairn.cluster.operator.objects import (
    GROUP,
    IMMUTABLE,
    Object,
    Ref,
    as_known,
    is_current,
    owned,
    ref_of,
)
from cairn.core.errors import CairnError, ConfigError

FINALIZER = f"{GROUP}/finalizer"

Spec = TypeVar("Spec", bound=msgspec.Struct)


class Apply(msgspec.Struct, frozen=True):
    """Server-side apply; `new`: an object of that name that is not ours is an error."""

    obj: Object
    new: bool


class Delete(msgspec.Struct, frozen=True):
    ref: Ref
    uid: str  # of the object that is meant: not of one that has its name since


class MergePatch(msgspec.Struct, frozen=True):
    """A merge patch, refused when the object has changed since it was seen."""

    ref: Ref
    patch: Object


class SetStatus(msgspec.Struct, frozen=True):
    ref: Ref
    status: Object


Action = Apply | Delete | MergePatch | SetStatus


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Observed state for a decision; it may be stale."""

    resource: Object
    children: list[Object]  # that this object controls
    related: list[Object] = []  # of the kinds that Kind.related names, in the same namespace
    apis: frozenset[str] = (
        frozenset()
    )  # optional kinds that this cluster has, as "group/version/Kind"
    now: str = ""  # RFC 3339

    @property
    def name(self) -> str:
        return self.resource["metadata"]["name"]

    @property
    def status(self) -> Object:
        return self.resource.get("status") or {}

    def child(self, kind: str, name: str) -> Object | None:
        named = (
            one for one in self.children if one["kind"] == kind and one["metadata"]["name"] == name
        )
        return next(named, None)


class RenderedObjects(msgspec.Struct, frozen=True, kw_only=True):
    """`objects` is None where the children have to stay as they are, whatever they are."""

    objects: list[Object] | None
    conditions: list[Condition]
    fields: Object | None = {}  # of the status, beside the conditions; None: as they are


class ResourceHandler(msgspec.Struct, frozen=True, kw_only=True):
    """Handlers for objects of one kind.

    `release` gives what has to be done before one may go, and None when it may; without it there is no finalizer.
    """

    name: str
    render: Callable[[Observed], RenderedObjects]
    release: Callable[[Observed], Sequence[Action] | None] | None = None
    related: tuple[str, ...] = ()


def reconcile(kind: ResourceHandler, observed: Observed) -> list[Action]:
    meta = observed.resource["metadata"]
    has_finalizer = FINALIZER in (meta.get("finalizers") or ())
    if meta.get("deletionTimestamp"):
        if not has_finalizer:
            return []
        before = kind.release(observed) if kind.release else None
        return [_finalizers(observed, add=False)] if before is None else list(before)
    if kind.release and not has_finalizer:  # before any child exists, so that all are released
        return [_finalizers(observed, add=True)]
    try:
        rendered = kind.render(observed)
    except CairnError as error:
        why = "; ".join(filter(None, (error.message, error.hint)))
        refused = Condition(type="Valid", ok=False, reason="Refused", message=why)
        return status_actions(observed, [refused])
    valid = Condition(type="Valid", ok=True, reason="Accepted")
    conditions = [valid, *rendered.conditions]
    return [*_changes(observed, rendered), *status_actions(observed, conditions, rendered.fields)]


def _changes(observed: Observed, rendered: RenderedObjects) -> list[Action]:
    if rendered.objects is None:
        return []
    live = {ref_of(one): one for one in observed.children}
    wanted = [owned(one, observed.resource) for one in as_known(rendered.objects, observed.apis)]
    refs = {ref_of(one) for one in wanted}
    actions: list[Action] = []
    for one in wanted:
        now = live.get(ref_of(one))
        if now is None:
            actions.append(Apply(one, new=True))
        elif now["metadata"].get("deletionTimestamp") or is_current(now, one):
            continue
        elif one["kind"] in IMMUTABLE:
            actions.append(delete(now))
        else:
            actions.append(Apply(one, new=False))
    return actions + [delete(one) for ref, one in live.items() if ref not in refs and alive(one)]


def delete(obj: Object) -> Delete:
    return Delete(ref_of(obj), obj["metadata"]["uid"])


def alive(obj: Object) -> bool:
    return not obj["metadata"].get("deletionTimestamp")


def status_actions(
    observed: Observed, conditions: list[Condition], fields: Object | None = None
) -> list[Action]:
    """Written only when it differs, so that a quiet cluster sees no writes. Without `fields` the others stay."""
    generation = observed.resource["metadata"].get("generation", 0)
    before = observed.status.get("conditions", [])
    status = {
        **(observed.status if fields is None else fields),
        "observedGeneration": generation,
        "conditions": written(conditions, before, generation, observed.now),
    }
    return [SetStatus(ref_of(observed.resource), status)] if status != observed.status else []


def _finalizers(observed: Observed, add: bool) -> MergePatch:
    meta = observed.resource["metadata"]
    others = [one for one in meta.get("finalizers") or () if one != FINALIZER]
    patch = {
        "resourceVersion": meta["resourceVersion"],
        "finalizers": [*others, FINALIZER] if add else others,
    }
    return MergePatch(ref_of(observed.resource), {"metadata": patch})


def read_spec(observed: Observed, schema: type[Spec], **more: object) -> Spec:
    """The spec as its class; what the schema of the CRD let through and the class refuses is a ConfigError."""
    kind = observed.resource["kind"]
    try:
        return msgspec.convert({**observed.resource.get("spec", {}), **more}, schema)
    except msgspec.ValidationError as error:
        raise ConfigError(f"spec: {error}", hint=f"kubectl explain {kind}.spec") from None
