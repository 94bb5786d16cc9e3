"""The objects that the operator knows of, from lists and watches, and which of its own a change concerns. No I/O."""

from collections import defaultdict
from collections.abc import Sequence

from cairn.cluster.operator.objects import API, Object, Ref, is_owned_by, owner_of, ref_of
from cairn.cluster.operator.reconcile import Kind

TOMBSTONES = 4096


class Cache:
    def __init__(self) -> None:
        self._objects: dict[Ref, Object] = {}
        self._children: dict[Ref, dict[Ref, None]] = defaultdict(dict)  # by owner
        self._kinds: dict[tuple[str, str], dict[Ref, None]] = defaultdict(
            dict
        )  # by apiVersion, kind
        self._gone: dict[Ref, int] = {}  # last version of what was deleted of late

    def get(self, ref: Ref) -> Object | None:
        return self._objects.get(ref)

    def replace(self, api: str, kind: str, found: list[Object]) -> list[Object]:
        """A fresh list: what it does not have is gone. The objects that changed, those that went included."""
        fresh = {ref_of(one) for one in found}
        gone = [self._objects[ref] for ref in self._kinds[api, kind] if ref not in fresh]
        changed = [one for one in found if one != self.get(ref_of(one))]
        for made in gone:
            self._drop(ref_of(made))
        for made in changed:
            self._put(made)
        return [*changed, *gone]

    def take(self, made: Object, gone: bool) -> bool:
        """False: it was known already, or is older than what is known."""
        ref, version = ref_of(made), int(made["metadata"]["resourceVersion"])
        there = self._objects.get(ref)
        known = int(there["metadata"]["resourceVersion"]) if there else -1
        same = there is not None and there["metadata"]["uid"] == made["metadata"]["uid"]
        if gone:
            self._gone[ref] = version
            if len(self._gone) > TOMBSTONES:
                del self._gone[next(iter(self._gone))]
            if same:
                self._drop(ref)
            return True
        if (same and version <= known) or version <= self._gone.get(ref, -1):
            return False  # the answer to a write may come after the event of a later deletion
        self._put(made)
        return True

    def children(self, owner: Object) -> list[Object]:
        uid = owner["metadata"]["uid"]
        found = (self._objects[ref] for ref in self._children.get(ref_of(owner), ()))
        return [one for one in found if is_owned_by(one, uid)]

    def related(self, resource: Object, kinds: Sequence[str]) -> list[Object]:
        mine = ref_of(resource)
        return [
            self._objects[ref]
            for kind in kinds
            for ref in self._kinds[mine.api, kind]
            if ref.namespace == mine.namespace
        ]

    def concerned(self, made: Object, kinds: Sequence[Kind]) -> list[Ref]:
        """The objects that have to be looked at after this one has changed."""
        ref, names = ref_of(made), {kind.name for kind in kinds}
        found = [ref] if ref.kind in names and ref.api == API else []
        owner = owner_of(made)
        if owner is not None and owner.kind in names:
            found.append(owner)
        interested = [kind.name for kind in kinds if ref.api == API and ref.kind in kind.related]
        return found + [
            other
            for name in interested
            for other in self._kinds[API, name]
            if other.namespace == ref.namespace
        ]

    def _put(self, made: Object) -> None:
        ref = ref_of(made)
        self._drop(ref)
        self._objects[ref] = made
        self._kinds[ref.api, ref.kind][ref] = None
        if (owner := owner_of(made)) is not None:
            self._children[owner][ref] = None

    def _drop(self, ref: Ref) -> None:
        there = self._objects.pop(ref, None)
        if there is None:
            return
        del self._kinds[ref.api, ref.kind][ref]
        if (owner := owner_of(there)) is not None:
            self._children[owner].pop(ref, None)
            if not self._children[owner]:  # most jobs come and go, and their names never again
                del self._children[owner]
