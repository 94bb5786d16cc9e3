"""The operator as it runs: watches, a queue of objects to look at, workers that carry out what `reconcile` says.

    list + watch -> Cache -> keys -> WorkQueue -> reconcile(Observed) -> actions -> API
                                        ^---- later, after an error ----'

Only the holder of the Lease acts. A process that loses it stops at once; one that gets it begins with fresh lists.
"""

import asyncio
import datetime
import time
from collections.abc import Callable, Sequence

from cairn.cluster.operator.api import (
    CONFLICT,
    MISSING,
    SERVER_ERROR,
    TOO_MANY,
    Api,
    ApiRefused,
    ApiUnreachable,
)
from cairn.cluster.operator.cache import ObjectCache
from cairn.cluster.operator.conditions import Condition, written
from cairn.cluster.operator.objects import API, KEDA_API, POOL_API, Object, Ref, ref_of
from cairn.cluster.operator.reconcile import Action, Observed, ResourceHandler, SetStatus, reconcile
from cairn.cluster.operator.work_queue import WorkQueue

WORKERS = 8
AGAIN_S = 1.0  # between two tries to reach the API
CHILDREN = (
    ("v1", "ConfigMap"),
    ("v1", "Service"),
    ("v1", "Secret"),
    ("v1", "Pod"),
    ("v1", "PersistentVolumeClaim"),
    ("apps/v1", "Deployment"),
    ("batch/v1", "Job"),
)
OPTIONAL = (
    ("policy/v1", "PodDisruptionBudget"),
    ("policy/v1beta1", "PodDisruptionBudget"),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    ("batch.volcano.sh/v1alpha1", "Job"),
    ("ray.io/v1", "RayJob"),
    (POOL_API, "InferencePool"),
    (KEDA_API, "ScaledObject"),
)

Say = Callable[[str], None]


class Operator:
    """Handles `kinds`, one object of them at a time in each worker."""

    def __init__(
        self, api: Api, kinds: Sequence[ResourceHandler], say: Say = lambda text: None
    ) -> None:
        self._api, self._say = api, say
        self._kinds = {kind.name: kind for kind in kinds}
        self.cache = ObjectCache()
        self.queue: WorkQueue[Ref] = WorkQueue()
        self.apis: frozenset[str] = frozenset()
        self._wake = asyncio.Event()
        self._last_said: dict[str, str] = {}
        self.writes = 0

    async def run(self) -> None:
        """While this operator leads."""
        for kind in self._kinds:
            await self._until_known(kind)
        # CRDs are served all at once: now a kind that is not there is not installed.
        served = await asyncio.gather(*(self._api.has(*pair) for pair in OPTIONAL))
        optional = [pair for pair, has in zip(OPTIONAL, served, strict=True) if has]
        self.apis = frozenset(f"{api}/{kind}" for api, kind in optional)
        own = [(API, name, False) for name in self._kinds]
        watched = own + [(api, kind, True) for api, kind in (*CHILDREN, *optional)]
        synced = [asyncio.Event() for _ in watched]
        async with asyncio.TaskGroup() as tasks:
            for (api, kind, children), event in zip(watched, synced, strict=True):
                tasks.create_task(self._follow(api, kind, children, event))
            for event in synced:  # decisions on half of the objects would delete the other half
                await event.wait()
            for _ in range(WORKERS):
                tasks.create_task(self._work())

    async def _until_known(self, kind: str) -> None:
        """A server that has just started does not serve CRDs yet; an old CRD may serve other versions only."""
        while not await self._api.has(API, kind):
            self._say_once(
                kind,
                f"this cluster does not serve {kind} of {API}, and the operator waits for it; "
                "`cairn operator manifests FOLDER` writes its CRD",
            )
            await asyncio.sleep(AGAIN_S)

    async def _follow(self, api: str, kind: str, children: bool, synced: asyncio.Event) -> None:
        """Keeps the cache as the cluster is, for one kind."""
        while True:
            try:
                objects, version = await self._api.list(api, kind, children)
                for changed in self.cache.replace(api, kind, objects):
                    self._changed(changed)
                synced.set()
                self._last_said.pop(kind, None)
                async for change, obj in self._api.watch(api, kind, children, version):
                    if self.cache.take(obj, gone=change == "DELETED"):
                        self._changed(obj)
            except (ApiRefused, ApiUnreachable) as error:
                self._say_once(kind, f"watching {kind}: {error.message}")
                await asyncio.sleep(AGAIN_S)

    def _say_once(self, about: str, text: str) -> None:
        """Log the failure of a repeated attempt only when its reason changes."""
        if self._last_said.get(about) != text:
            self._say(text)
        self._last_said[about] = text

    def _changed(self, obj: Object) -> None:
        for ref in self.cache.concerned(obj, list(self._kinds.values())):
            self.queue.add(ref)
        self._wake.set()

    async def _work(self) -> None:
        while True:
            key = self.queue.take(time.monotonic())
            if key is None:
                await self._rest()
                continue
            failed = True
            try:
                failed = not await self.handle(key)
            except Exception as error:  # noqa: BLE001  a bug with one object must not end the work for all
                self._say(f"{key}: this is a bug: {error!r}")
            finally:
                self.queue.done(key, time.monotonic(), failed)

    async def _rest(self) -> None:
        self._wake.clear()
        due = self.queue.next_s()
        wait = max(0.0, due - time.monotonic()) if due is not None else None
        try:
            await asyncio.wait_for(self._wake.wait(), wait)
        except TimeoutError:
            return

    async def handle(self, key: Ref) -> bool:
        """Brings one object nearer to what it asks for; False: try again later."""
        resource = self.cache.get(key)
        if resource is None:
            return True
        observed = self._observed(resource)
        for action in reconcile(self._kinds[key.kind], observed):
            try:
                await self._carry_out(action)
            except ApiUnreachable as error:
                self._say(f"{key}: {error.message}")
                return False
            except ApiRefused as error:
                if error.code == MISSING and isinstance(action, SetStatus):
                    return False  # it has gone, or CRDs are not served yet: its event or the next try will tell
                self._say(f"{key}: {error.message}")
                await self._report(observed, error)
                return False
        return True

    async def _carry_out(self, action: Action) -> None:
        self.writes += 1
        obj = await self._api.do(action)
        if obj is not None and self.cache.take(obj, gone=False):
            self._changed(obj)  # its event will be no news any more

    async def _report(self, observed: Observed, error: ApiRefused) -> None:
        """Write an API rejection to the status; conflicts and server errors are retried without a report."""
        if error.code == CONFLICT and "exists already" not in error.message:
            return
        if error.code == TOO_MANY or error.code >= SERVER_ERROR:
            return
        meta, before = observed.resource["metadata"], observed.status.get("conditions", [])
        refused = Condition(type="Applied", ok=False, reason="Refused", message=error.message)
        generation = meta.get("generation", 0)
        conditions = written([refused], before, generation, observed.now)
        status = {**observed.status, "observedGeneration": generation, "conditions": conditions}
        if status == observed.status:
            return
        try:
            await self._carry_out(SetStatus(ref_of(observed.resource), status))
        except (ApiRefused, ApiUnreachable) as worse:
            self._say(f"status of {meta['name']}: {worse.message}")

    def _observed(self, resource: Object) -> Observed:
        kind = self._kinds[resource["kind"]]
        return Observed(
            resource=resource,
            children=self.cache.children(resource),
            related=self.cache.related(resource, kind.related),
            apis=self.apis,
            now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
