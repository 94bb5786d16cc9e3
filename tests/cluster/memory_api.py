"""An API server of Kubernetes in memory, behind lightkube's HTTP client: enough to test an operator in milliseconds.

Faithful in what operators rely on: versions and conflicts, generation, status apart from spec, server-side apply with
owners of fields, finalizers, deletion of children with their owner, label selectors, watches and their 410. It has no
schemas, no defaults and no controllers; tests set the status of what controllers would work on.
"""

import asyncio
import copy
import itertools
import json
from urllib.parse import parse_qsl

import httpx2

from cairn.cluster.operator.objects import MERGE_KEYS, Object

APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
HIDDEN = ("uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")


class Crash(BaseException):
    """The operator dies here."""


class MemoryApi(httpx2.AsyncBaseTransport):
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}  # (api/plural, namespace, name)
        self.owners: dict[tuple[str, str, str], dict[str, set[tuple]]] = {}
        self.log: list[tuple[int, str, tuple[str, str, str], Object]] = []
        self.version, self.oldest, self.writes, self.uids = 0, 0, 0, itertools.count(1)
        self.absent: set[str] = set()  # "policy/v1/poddisruptionbudgets": kinds that are not there
        self.crash_in: int | None = None  # dies in so many writes, before or after the last
        self.crash_before = False
        self.down = self.silent = False  # silent: it takes requests and never answers
        self.trouble: list[int] = []  # codes of the next answers, such as 503
        self.network = 0  # watches that were opened before this changed hear nothing more
        self.changed = asyncio.Condition()

    # ------------------------------------------------------------------ HTTP

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        while self.silent:
            await asyncio.sleep(0.01)
        if self.down:
            raise httpx2.ConnectError("connection refused", request=request)
        if self.trouble:
            code = self.trouble.pop()
            return _answer(request, code, _status(code, "in trouble"))
        words = request.url.path.strip("/").split("/")
        params = dict(parse_qsl(request.url.query.decode()))
        kind, namespace, rest = _route(words)
        if kind in self.absent:
            return _answer(request, 404, _status(404, f"the server has no {kind}"))
        if params.get("watch"):
            stream = _Lines(self._watch(kind, namespace, params))
            return httpx2.Response(200, stream=stream, request=request)
        body = json.loads(await request.aread() or b"null")
        if request.method == "GET":
            code, made = self._read(kind, namespace, rest, params)
        else:
            self._maybe_crash(before=True)
            content = request.headers.get("content-type", "")
            code, made = self.write(request.method, kind, namespace, rest, params, body, content)
            self._maybe_crash(before=False)
            async with self.changed:
                self.changed.notify_all()
        return _answer(request, code, made)

    def _maybe_crash(self, before: bool) -> None:
        if self.crash_in is None or before != self.crash_before:
            return
        self.crash_in -= 1
        if self.crash_in < 0:
            self.crash_in = None
            raise Crash

    def _read(self, kind, namespace, rest, params) -> tuple[int, Object]:
        if rest:
            found = self.objects.get((kind, namespace, rest[0]))
            return (200, found) if found else (404, _status(404, f"{kind} {rest[0]} not found"))
        items = [
            made
            for key, made in self.objects.items()
            if _selects(key, kind, namespace, params, made)
        ]
        return 200, {"metadata": {"resourceVersion": str(self.version)}, "items": items}

    async def _watch(self, kind, namespace, params):
        last, network = int(params.get("resourceVersion") or self.version), self.network
        while True:
            if self.network != network:
                await asyncio.Event().wait()
            if last < self.oldest:
                yield {"type": "ERROR", "object": _status(410, "too old resource version")}
                return
            for version, change, key, made in self.log[:]:
                if version > last and _selects(key, kind, namespace, params, made):
                    yield {"type": change, "object": made}
            last = max(last, self.version)
            async with self.changed:
                if self.version <= last and last >= self.oldest:
                    await self.changed.wait()

    # ------------------------------------------------------------------ writes

    def write(self, method, kind, namespace, rest, params, body, content) -> tuple[int, Object]:
        self.writes += 1
        name = rest[0] if rest else body["metadata"]["name"]
        key, there = (kind, namespace, name), self.objects.get((kind, namespace, name))
        if method == "POST" and there:
            return 409, _status(409, f"{kind} {name} already exists")
        if method == "DELETE":
            # As the real one: pods of a Job stay, unless whoever deletes it says otherwise.
            stay = kind == "batch/v1/jobs" and "propagationPolicy" not in {**params, **(body or {})}
            return self._delete(key, stay) if there else (404, _status(404, f"{name} not found"))
        applies = method == "PATCH" and content.startswith(APPLY)
        if there is None and (
            method == "PUT" or len(rest) > 1 or (method == "PATCH" and not applies)
        ):
            return 404, _status(404, f"{kind} {name} not found")
        wanted = (body.get("metadata") or {}).get("resourceVersion")
        if there and wanted and wanted != there["metadata"]["resourceVersion"]:
            return 409, _status(409, "the object has been modified")
        part = rest[1] if len(rest) > 1 else ""
        if applies:
            force = params.get("force") == "true"
            made = self._applied(key, there, body, params["fieldManager"], force, part)
            if isinstance(made, str):
                return 409, _status(409, f"Apply failed with conflict: {made}")
        else:
            made = _merged(there or {}, body) if method == "PATCH" else body
        return 200, self._store(key, there, made, part)

    def _applied(self, key, there, body, manager, force, part) -> Object | str:
        live = dict(flatten(there or {}))
        new = dict(
            flatten({k: v for k, v in body.items() if (k == "status") == (part == "status")})
        )
        new = {
            path: value
            for path, value in new.items()
            if path[:1] not in (("apiVersion",), ("kind",))
        }
        new = {
            path: v
            for path, v in new.items()
            if path[:2] not in [("metadata", one) for one in HIDDEN]
        }
        owners = self.owners.setdefault(key, {})
        for path, value in new.items():
            others = [one for one, paths in owners.items() if one != manager and path in paths]
            if there and path in live and live[path] != value and others:
                if not force:
                    return f"{'.'.join(map(str, path))} of {others[0]}"
                for one in others:
                    owners[one].discard(path)
        mine = f"{manager}/{part}"
        for path in owners.get(mine, set()) - set(new):
            if not any(path in paths for one, paths in owners.items() if one != mine):
                live.pop(path, None)
        owners[mine] = set(new)
        made = unflatten(live | new)
        return {**made, "apiVersion": body["apiVersion"], "kind": body["kind"]}

    def edit(self, key, patch: Object, manager: str = "kubectl-edit") -> None:
        """Somebody changes fields by hand, and owns them from then on."""
        made = _merged(self.objects[key], patch)
        paths = {path for path, _ in flatten(patch)}
        for owned in self.owners.get(key, {}).values():
            owned -= paths
        self.owners.setdefault(key, {}).setdefault(manager, set()).update(paths)
        self._store(key, self.objects[key], made, "")

    def set_status(self, key, status: Object) -> None:
        there = self.objects[key]
        self._store(key, there, {**there, "status": status}, "status")

    def _store(self, key, there: Object | None, made: Object, part: str) -> Object:
        made = copy.deepcopy(made)
        if there is not None:
            kept = {k: v for k, v in there["metadata"].items() if k in HIDDEN}
            if part == "status":
                made = {**there, "status": made.get("status", {})}
            else:
                made["metadata"] |= kept
                made.pop("status", None)
                made |= {"status": there["status"]} if "status" in there else {}
            if made == there:
                return there
        else:
            made.pop("status", None)
            made["metadata"] |= {
                "uid": f"uid-{next(self.uids)}",
                "generation": 0,
                "namespace": key[1],
            }
            made["metadata"].pop("resourceVersion", None)
        if there is None or _spec(made) != _spec(there):
            made["metadata"] = {
                **made["metadata"],
                "generation": made["metadata"]["generation"] + 1,
            }
        if made["metadata"].get("deletionTimestamp") and not made["metadata"].get("finalizers"):
            return self._remove(key)
        return self._record(key, made, "MODIFIED" if there else "ADDED")

    def _record(self, key, made: Object, change: str) -> Object:
        self.version += 1
        made = {**made, "metadata": {**made["metadata"], "resourceVersion": str(self.version)}}
        self.log.append((self.version, change, key, made))
        if change != "DELETED":
            self.objects[key] = made
        return made

    def _delete(self, key, children_stay: bool = False) -> tuple[int, Object]:
        made = self.objects[key]
        if made["metadata"].get("finalizers"):
            if not made["metadata"].get("deletionTimestamp"):
                marked = {**made["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
                self._record(key, {**made, "metadata": marked}, "MODIFIED")
        else:
            self._remove(key, children_stay)
        return 200, _status(200, "")

    def _remove(self, key, children_stay: bool = False) -> Object:
        made = self.objects.pop(key)
        self.owners.pop(key, None)
        self._record(key, made, "DELETED")
        uid = made["metadata"]["uid"]
        for child, there in [] if children_stay else list(self.objects.items()):
            if any(one["uid"] == uid for one in there["metadata"].get("ownerReferences") or ()):
                self._delete(child)
        return made

    def named(self, kind: str, namespace: str = "default") -> dict[str, Object]:
        return {key[2]: made for key, made in self.objects.items() if key[:2] == (kind, namespace)}


def _route(words: list[str]) -> tuple[str, str, list[str]]:
    """api/v1/namespaces/NS/PLURAL/NAME/SUB, or without a namespace for lists of all of them."""
    api, rest = ("v1", words[2:]) if words[0] == "api" else ("/".join(words[1:3]), words[3:])
    if rest[0] == "namespaces" and len(rest) > 2:
        return f"{api}/{rest[2]}", rest[1], rest[3:]
    return f"{api}/{rest[0]}", "*", rest[1:]


def _selects(key, kind, namespace, params, made) -> bool:
    if key[0] != kind or namespace not in ("*", key[1]):
        return False
    wanted = dict(one.split("=") for one in params.get("labelSelector", "").split(",") if one)
    return wanted.items() <= (made["metadata"].get("labels") or {}).items()


def _spec(made: Object) -> Object:
    return {key: value for key, value in made.items() if key not in ("metadata", "status")}


def _merged(there: Object, patch: Object) -> Object:
    made = dict(there)
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        elif isinstance(value, dict):
            made[key] = _merged(made.get(key) or {}, value)
        else:
            made[key] = value
    return made


def flatten(made, path=()):
    """Leaves by their path; entries of lists that have a key are addressed by it, other lists are one value."""
    if isinstance(made, dict) and made:
        for key, value in made.items():
            yield from flatten(value, (*path, key))
        return
    if isinstance(made, list) and made and all(isinstance(one, dict) for one in made):
        key = next((key for key in MERGE_KEYS if all(key in one for one in made)), None)
        if key is not None:
            for one in made:
                yield from flatten(one, (*path, (key, one[key])))
            return
    if path:
        yield path, copy.deepcopy(made)


def unflatten(leaves: dict) -> Object:
    root: Object = {}
    for path, value in leaves.items():
        here = root
        for step, after in zip(path, (*path[1:], None), strict=True):
            fresh = value if after is None else [] if isinstance(after, tuple) else {}
            if isinstance(step, tuple):
                found = next((one for one in here if one.get(step[0]) == step[1]), None)
                if found is None:
                    here.append(found := {step[0]: step[1]})
                here = found
            elif after is None:
                here[step] = value
            else:
                here = here.setdefault(step, fresh)
    return root


def _status(code: int, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "message": message, "metadata": {}}


def _answer(request, code: int, made: Object) -> httpx2.Response:
    return httpx2.Response(code, json=made, request=request)


class _Lines(httpx2.AsyncByteStream):
    def __init__(self, events) -> None:
        self._events = events

    async def __aiter__(self):
        async for event in self._events:
            yield json.dumps(event).encode() + b"\n"
