"""The calls of the operator to the Kubernetes API, through lightkube, in plain dictionaries.

Any object is addressed by its apiVersion and kind; nothing here knows what the objects mean.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from cairn.cluster.operator.objects import MANAGED, MANAGER, Object, Ref, is_owned_by, plural
from cairn.cluster.operator.reconcile import Action, Apply, Delete, MergePatch, SetStatus
from cairn.core.errors import CairnError

WATCH_S = 240  # after which the server ends a watch and it is begun again where it was
SILENT_S = 30  # after that time: the other end of the connection is taken to be gone
MISSING, CONFLICT, TOO_MANY, SERVER_ERROR = 404, 409, 429, 500


class ApiRefused(CairnError):
    """The API server answered, and said no."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class ApiUnreachable(CairnError):
    """The API server did not answer."""


class Api:
    """`namespace` "*" means all of them."""

    def __init__(self, client: Any, namespace: str = "*") -> None:
        self._client, self.namespace = client, namespace

    async def has(self, api: str, kind: str) -> bool:
        """Return whether the cluster serves this kind."""
        pages = self._client.list(_resource(api, kind), namespace=self.namespace, chunk_size=1)
        try:
            with _translated():
                async for _ in pages:
                    break
        except ApiRefused as refused:
            if refused.code == MISSING:
                return False
            raise
        return True

    async def list(self, api: str, kind: str, children: bool) -> tuple[list[Object], str]:
        """All objects of a kind, or those that the operator created, and the version to watch from."""
        pages = self._client.list(
            _resource(api, kind), namespace=self.namespace, labels=_labels(children)
        )
        with _translated():
            objects = [_plain(one, api, kind) async for one in pages]
        return objects, pages.resourceVersion

    async def watch(
        self, api: str, kind: str, children: bool, version: str
    ) -> AsyncIterator[tuple[str, Object]]:
        """Changes since `version`; raises ApiRefused 410 where that is too long ago."""
        while True:
            events = self._client.watch(
                _resource(api, kind),
                namespace=self.namespace,
                labels=_labels(children),
                resource_version=version,
                server_timeout=WATCH_S,
            )
            until_s = asyncio.get_running_loop().time() + WATCH_S + SILENT_S
            while (event := await _next(events, until_s)) is not None:
                change, obj = event[0], _plain(event[1], api, kind)
                version = obj["metadata"]["resourceVersion"]
                yield change, obj

    async def get(self, ref: Ref) -> Object | None:
        resource = _resource(ref.api, ref.kind)
        try:
            with _translated():
                got = await self._client.get(resource, ref.name, namespace=ref.namespace)
        except ApiRefused as refused:
            if refused.code == MISSING:
                return None
            raise
        return _plain(got, ref.api, ref.kind)

    async def create(self, obj: Object) -> Object:
        return await self._write("create", _typed(obj))

    async def replace(self, obj: Object) -> Object:
        return await self._write("replace", _typed(obj))

    async def do(self, action: Action) -> Object | None:
        """The object after the action; None where it is gone."""
        from lightkube.types import PatchType

        match action:
            case Apply(obj, new):
                return await self._apply(obj, new)
            case Delete(ref, uid):
                return await self._delete(ref, uid)
            case MergePatch(ref, patch):
                where = (_resource(ref.api, ref.kind), ref.name, patch)
                return await self._patch(ref, *where, patch_type=PatchType.MERGE)
            case SetStatus(ref, status):
                body = {
                    "apiVersion": ref.api,
                    "kind": ref.kind,
                    "metadata": {"name": ref.name, "namespace": ref.namespace},
                    "status": status,
                }
                where = (_resource(ref.api, ref.kind).Status, ref.name, body)
                return await self._patch(
                    ref, *where, patch_type=PatchType.APPLY, field_manager=MANAGER, force=True
                )

    async def _apply(self, obj: Object, new: bool) -> Object | None:
        from lightkube.types import PatchType

        meta = obj["metadata"]
        ref = Ref(obj["apiVersion"], obj["kind"], meta["namespace"], meta["name"])
        if new and (live := await self.get(ref)) is not None:
            if not is_owned_by(live, meta["ownerReferences"][0]["uid"]):
                raise ApiRefused(CONFLICT, f"{ref} exists already and is not ours")
            return live  # created a moment ago: its event is still to come
        return await self._patch(
            ref,
            _resource(ref.api, ref.kind),
            ref.name,
            obj,
            patch_type=PatchType.APPLY,
            field_manager=MANAGER,
            force=not new,
        )

    async def _delete(self, ref: Ref, uid: str) -> None:
        live = await self.get(ref)
        if live is None or live["metadata"]["uid"] != uid:
            return
        from lightkube.types import CascadeType

        resource = _resource(ref.api, ref.kind)
        try:
            # A Job that is deleted without a cascade leaves its pods behind, which go on.
            with _translated():
                await self._client.delete(
                    resource, ref.name, namespace=ref.namespace, cascade=CascadeType.BACKGROUND
                )
        except ApiRefused as refused:
            if refused.code != MISSING:
                raise

    async def _patch(self, ref: Ref, *where: Any, **how: Any) -> Object | None:
        with _translated():
            obj = await self._client.patch(*where, namespace=ref.namespace, **how)
        return _plain(obj, ref.api, ref.kind)

    async def _write(self, verb: str, obj: Any) -> Object:
        with _translated():
            written = await getattr(self._client, verb)(obj)
        return _plain(written, obj["apiVersion"], obj["kind"])


def connect(namespace: str = "*", context: str = "", transport: Any = None) -> Api:
    """Connect with the pod's service account; outside of a pod with KUBECONFIG or ~/.kube/config."""
    try:
        from lightkube import AsyncClient, KubeConfig
        from lightkube.core.exceptions import ConfigError
    except ModuleNotFoundError:
        raise CairnError(
            "lightkube is not installed", hint="pip install 'cairn-stack[kubernetes]'"
        ) from None
    try:
        config = KubeConfig.from_env().get(context or None)
    except ConfigError as error:
        raise CairnError(
            f"no cluster to connect to: {error}",
            hint="set KUBECONFIG, or name one of `kubectl config get-contexts` with --context",
        ) from None
    more = {"transport": transport} if transport is not None else {}
    return Api(AsyncClient(config=config, **more), namespace)


async def _next(events: AsyncIterator[Any], until_s: float) -> Any:
    """The next event; None when none has come by then."""
    with _translated():
        try:
            async with asyncio.timeout_at(until_s):
                return await anext(events, None)
        except TimeoutError:
            return None


@functools.cache
def _resource(api: str, kind: str) -> Any:
    """A class of lightkube for a kind, of any group; its registry would hold others of the core group already."""
    from lightkube import generic_resource as generic
    from lightkube.core.resource import ApiInfo

    group, _, version = api.rpartition("/")
    info = generic.create_api_info(group, version, kind, plural(kind))
    status = ApiInfo(
        resource=info.resource,
        parent=info.resource,
        plural=info.plural,
        verbs=["get", "patch", "put"],
        action="status",
    )
    part = type(f"{kind}Status", (generic.GenericNamespacedStatus,), {"_api_info": status})
    return type(kind, (generic.GenericNamespacedResource,), {"_api_info": info, "Status": part})


def _typed(obj: Object) -> Any:
    return _resource(obj["apiVersion"], obj["kind"])(obj)


def _labels(children: bool) -> dict[str, str] | None:
    return {MANAGED: MANAGER} if children else None


def _plain(obj: Any, api: str, kind: str) -> Object:
    """Lists leave out what every object of them is; who owns which field is half of an object, and only the API's."""
    plain: Object = {**obj.to_dict(), "apiVersion": api, "kind": kind}
    plain["metadata"] = {k: v for k, v in plain["metadata"].items() if k != "managedFields"}
    return plain


@contextmanager
def _translated() -> Iterator[None]:
    """lightkube's and httpx's exceptions as ours."""
    import httpx2
    from lightkube import ApiError

    try:
        yield
    except ApiError as error:
        raise ApiRefused(error.status.code or 0, error.status.message or "") from None
    except httpx2.HTTPStatusError as error:
        raise ApiRefused(error.response.status_code, str(error)) from None
    except (httpx2.HTTPError, OSError) as error:
        raise ApiUnreachable(f"the API server does not answer: {error!r}") from None
