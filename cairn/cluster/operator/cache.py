"""The objects that the operator knows of, from lists and watches, and which of its own a change concerns. No I/O."""

from collections import defaultdict
from collections.abc import Sequence

from cairn.cluster.operator.objects import API, Object, Ref, is_owned_by, owner_of, ref_of
from cairn.cluster.operator.reconcile import ResourceHandler

TOMBSTONES = 4096


class ObjectCache:
    def __init__(self) -> None:
        self._objects: dict[Ref, Object] = {}
        self._children: dict[Ref, dict[Ref, None]] = defaultdict(dict)  # by owner
        self._kinds: dict[tuple[str, str], dict[Ref, None]] = defaultdict(
            dict
        )  # by apiVersion, kind
        self._gone: dict[Ref, int] = {}  # last version of what was deleted of late

    def get(self, ref: Ref) -> Object | None:
        return self._objects.get(ref)

    def replace(self, api: str, kind: str, objects: list[Object]) -> list[Object]:
        """A fresh list: what it does not have is gone. The objects that changed, those that went included."""
        fresh = {ref_of(one) for one in objects}
        gone = [self._objects[ref] for ref in self._kinds[api, kind] if ref not in fresh]
        changed = [one for one in objects if one != self.get(ref_of(one))]
        for obj in gone:
            self._drop(ref_of(obj))
        for obj in changed:
            self._put(obj)
        return [*changed, *gone]

    def take(self, obj: Object, gone: bool) -> bool:
        """False: it was known already, or is older than what is known."""
        ref, version = ref_of(obj), int(obj["metadata"]["resourceVersion"])
        before = self._objects.get(ref)
        known = int(before["metadata"]["resourceVersion"]) if before else -1
        same = before is not None and before["metadata"]["uid"] == obj["metadata"]["uid"]
        if gone:
            self._gone[ref] = version
            if len(self._gone) > TOMBSTONES:
                del self._gone[next(iter(self._gone))]
            if same:
                self._drop(ref)
            return True
        if (same and version <= known) or version <= self._gone.get(ref, -1):
            return False  # the answer to a write may come after the event of a later deletion
        self._put(obj)
        return True

    def children(self, owner: Object) -> list[Object]:
        uid = owner["metadata"]["uid"]
        children = (self._objects[ref] for ref in self._children.get(ref_of(owner), ()))
        return [one for one in children if is_owned_by(one, uid)]

    def related(self, resource: Object, kinds: Sequence[str]) -> list[Object]:
        mine = ref_of(resource)
        return [
            self._objects[ref]
            for kind in kinds
            for ref in self._kinds[mine.api, kind]
            if ref.namespace == mine.namespace
        ]

    def concerned(self, obj: Object, kinds: Sequence[ResourceHandler]) -> list[Ref]:
        """The objects that have to be looked at after this one has changed."""
        ref, names = ref_of(obj), {kind.name for kind in kinds}
        concerned = [ref] if ref.kind in names and ref.api == API else []
        owner = owner_of(obj)
        if owner is not None and owner.kind in names:
            concerned.append(owner)
        interested = [kind.name for kind in kinds if ref.api == API and ref.kind in kind.related]
        return concerned + [
            other
            for name in interested
            for other in self._kinds[API, name]
            if other.namespace == ref.namespace
        ]

    def _put(self, obj: Object) -> None:
        ref = ref_of(obj)
        self._drop(ref)
        self._objects[ref] = obj
        self._kinds[ref.api, ref.kind][ref] = None
        if (owner := owner_of(obj)) is not None:
            self._children[owner][ref] = None

    def _drop(self, ref: Ref) -> None:
        before = self._objects.pop(ref, None)
        if before is None:
            return
        del self._kinds[ref.api, ref.kind][ref]
        if (owner := owner_of(before)) is not None:
            self._children[owner].pop(ref, None)
            if not self._children[owner]:  # most jobs come and go, and their names never again
                del self._children[owner]
