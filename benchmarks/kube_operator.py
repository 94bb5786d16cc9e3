"""Many services of the operator on a real API server: until all are ready, a quiet minute, a leader that is killed.

    CAIRN_KUBE_ASSETS=FOLDER python benchmarks/kube_operator.py --services 1000 --out benchmarks/cpu/operator.json

FOLDER has kube-apiserver; etcd is on the PATH. Two `cairn operator run` are started as users start them; one leads.
This program makes the services, and writes the status of each Deployment as soon as it sees it, in place of the
cluster's controllers. No ReplicaSet and no pod is made, so the time is that of the operator, the API server and etcd. A
service is ready when its status says so. Writes are those that the API server counts, the leader's Lease apart. All of
it shares this machine, so the CPU time of each process stands beside the clock.

`--faults` goes on with what may happen meanwhile: the leader killed while it makes as many services again, the API
server gone for a minute, an etcd that does not answer. Afterwards every service has each of its children once. Needs no
GPU.
"""

import argparse
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
from kube_server import ControlPlane

from cairn.bench.record import add_arguments, record
from cairn.cli.cluster.operator import definitions
from cairn.cluster.operator.crd import crd
from cairn.cluster.operator.objects import API, MANAGED, MANAGER, Object

SERVICES = f"/apis/{API}/namespaces/default/inferenceservices"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/cairn-operator"
CHILDREN = {  # of each service: path of the kind, and the ends of the names
    "/api/v1/namespaces/default/configmaps": ("-router",),
    "/api/v1/namespaces/default/services": ("", "-servers-0"),
    DEPLOYMENTS: ("-router", "-servers-0"),
    "/apis/policy/v1beta1/namespaces/default/poddisruptionbudgets": ("-servers-0",),
}
OURS = {"labelSelector": f"{MANAGED}={MANAGER}"}
AT_ONCE = 8  # requests of this program
PATIENCE_S = 1800.0
AGAIN = (404, 429)  # of an API server that has just started, or has too much to do
STATUS = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
COUNTED = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)
WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds of the quiet minute")
    parser.add_argument("--lease", type=int, default=10, help="seconds, as of `operator run`")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--gone", type=float, default=60.0, help="seconds without an API server")
    parser.add_argument("--slow", type=float, default=15.0, help="seconds of a silent etcd")
    parser.add_argument("--keep", type=Path, help="a folder for the logs")
    add_arguments(parser)
    given = parser.parse_args()
    busy = os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    with cluster(given) as (plane, operators):
        measured = asyncio.run(measure(given, plane, operators))
    record({"load_average_before": busy, **measured}, given)


@contextlib.contextmanager
def cluster(given: argparse.Namespace) -> Iterator[tuple[ControlPlane, "Operators"]]:
    with contextlib.ExitStack() as stack:
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        plane = ControlPlane(folder)
        stack.callback(plane.close)
        operators = Operators(folder, plane, given.lease)
        stack.callback(operators.close)
        yield plane, operators


class Operators:
    """The processes of `cairn operator run`."""

    def __init__(self, folder: Path, plane: ControlPlane, lease_s: int) -> None:
        self.log = folder / "operators.log"
        self.processes: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
        self._command = [
            sys.executable,
            "-m",
            "cairn",
            "operator",
            "run",
            "--lease-s",
            str(lease_s),
        ]

    def start(self) -> None:
        with self.log.open("ab") as log:
            process = subprocess.Popen(self._command, stderr=log, env=self._environment)
        self.processes.append(process)

    def find(self, holder: str) -> "subprocess.Popen[bytes]":
        return next(one for one in self.processes if holder.endswith(f"-{one.pid}"))

    def close(self) -> None:
        for one in self.processes:
            one.kill()
            one.wait()


def cpu_s(process: "subprocess.Popen[bytes]") -> float:
    """User and system time so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waited_s(process: "subprocess.Popen[bytes]") -> float:
    """How long its first thread could have run so far, and others ran."""
    return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9


def peak_mb(process: "subprocess.Popen[bytes]") -> float:
    text = Path(f"/proc/{process.pid}/status").read_text()
    return round(int(re.search(r"VmHWM:\s+(\d+)", text)[1]) / 1024, 1)  # type: ignore[index]


class Cluster:
    """What this program sees of the cluster and does in it."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.ready: dict[str, float] = {}  # when a service first was
        self._written: dict[str, int] = {}  # generation of each Deployment whose status stands
        self._due: asyncio.Queue[Object] = asyncio.Queue()
        self._room = asyncio.Semaphore(AT_ONCE)

    async def make(self, name: str) -> None:
        meta, spec = {"name": name}, {"servers": [{"model": "m"}]}
        body = {"apiVersion": API, "kind": "InferenceService", "metadata": meta, "spec": spec}
        async with self._room:
            await self.ask("POST", SERVICES, body)

    async def ask(self, method: str, path: str, body: Object, form: str = "json") -> Object:
        """Again while the API server does not answer; what was made before is made."""
        content = msgspec.json.encode(body)
        headers = {"Content-Type": f"application/{form}"}
        while True:
            try:
                got = await self.client.request(method, path, content=content, headers=headers)
            except httpx.HTTPError:
                await asyncio.sleep(0.5)
                continue
            if got.status_code == 409 and method == "POST":
                return {}
            if got.status_code < 500 and got.status_code not in AGAIN:
                if got.is_error:
                    raise RuntimeError(f"{method} {path}: {got.text}")
                return msgspec.json.decode(got.content)
            await asyncio.sleep(0.5)

    async def get(self, path: str, params: dict[str, str] | None = None) -> Object:
        got = await self.client.get(path, params=params, timeout=PATIENCE_S)
        return msgspec.json.decode(got.raise_for_status().content)

    async def follow(self, path: str, note: Callable[[Object], None]) -> None:
        """All objects of a kind, as they are and as they become, through the loss of the API server."""
        while True:
            with contextlib.suppress(httpx.HTTPError, KeyError):  # no metadata: too old a version
                found = await self.get(path)
                for one in found["items"]:
                    note(one)
                async for one in self._changes(path, found["metadata"]["resourceVersion"]):
                    note(one)
            await asyncio.sleep(0.5)

    async def _changes(self, path: str, version: str) -> AsyncIterator[Object]:
        params = {"watch": "true", "resourceVersion": version}
        async with self.client.stream("GET", path, params=params, timeout=None) as got:
            async for line in got.aiter_lines():
                made = msgspec.json.decode(line)["object"]
                made["metadata"]["resourceVersion"]  # an error has none
                yield made

    def note_service(self, made: Object) -> None:
        status = made.get("status", {})
        fresh = status.get("observedGeneration") == made["metadata"]["generation"]
        states = {one["type"]: one["status"] for one in status.get("conditions", [])}
        if fresh and states.get("Ready") == "True":
            self.ready.setdefault(made["metadata"]["name"], time.monotonic())

    def note_deployment(self, made: Object) -> None:
        name, generation = made["metadata"]["name"], made["metadata"]["generation"]
        if self._written.get(name) != generation:
            self._written[name] = generation
            self._due.put_nowait(made)

    async def write_statuses(self) -> None:
        """Deployments have the replicas that they ask for."""
        while True:
            made = await self._due.get()
            count = made["spec"]["replicas"]
            status = dict.fromkeys(STATUS, count)
            status["observedGeneration"] = made["metadata"]["generation"]
            path = f"{DEPLOYMENTS}/{made['metadata']['name']}/status?fieldManager=controllers"
            await self.ask("PATCH", path, {"status": status}, form="merge-patch+json")

    async def holder(self) -> str:
        with contextlib.suppress(httpx.HTTPError):
            lease = await self.get(LEASE)
            return lease["spec"].get("holderIdentity") or ""
        return ""

    async def writes(self) -> Counter[str]:
        """By verb and resource, since the API server was started; not those of Leases."""
        text = (await self.client.get("/metrics", timeout=PATIENCE_S)).text
        counted: Counter[str] = Counter()
        for labels, count in COUNTED.findall(text):
            found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if found["verb"] in WRITES and found["resource"] != "leases":
                part = f"/{found['subresource']}" if found["subresource"] else ""
                counted[f"{found['verb']} {found['resource']}{part}"] += int(float(count))
        return counted

    async def children(self) -> dict[tuple[str, str], tuple[str, str]]:
        """The uids of each child and of its owner."""
        found = {}
        for path in CHILDREN:
            for one in (await self.get(path, OURS))["items"]:
                meta = one["metadata"]
                owner = (meta.get("ownerReferences") or [{"uid": ""}])[0]["uid"]
                found[path, meta["name"]] = (meta["uid"], owner)
        return found

    async def wrong(self, names: list[str]) -> dict[str, int]:
        """Children that are missing, of nobody, or more than there should be."""
        services = (await self.get(SERVICES))["items"]
        uids = {one["metadata"]["name"]: one["metadata"]["uid"] for one in services}
        wanted = {
            (path, name + end): uids.get(name)
            for name in names
            for path, ends in CHILDREN.items()
            for end in ends
        }
        there = {key: owner for key, (_, owner) in (await self.children()).items()}
        return {
            "services": len(services),
            "children": len(there),
            "missing": len(wanted.keys() - there.keys()),
            "more than asked for": len(there.keys() - wanted.keys()),
            "orphaned": sum(owner not in uids.values() for owner in there.values()),
            "of another": sum(there.get(key, owner) != owner for key, owner in wanted.items()),
        }


async def measure(
    given: argparse.Namespace, plane: ControlPlane, operators: Operators
) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {plane.token}"}
    async with (
        httpx.AsyncClient(
            base_url=plane.url, headers=headers, verify=False, timeout=30.0, trust_env=False
        ) as client,
        asyncio.TaskGroup() as tasks,
    ):
        seen = Cluster(client)
        await install(seen)
        working = [
            tasks.create_task(seen.follow(SERVICES, seen.note_service)),
            tasks.create_task(seen.follow(DEPLOYMENTS, seen.note_deployment)),
            *(tasks.create_task(seen.write_statuses()) for _ in range(AT_ONCE)),
        ]
        for _ in range(2):
            operators.start()
        await until(seen.holder)
        say("an operator leads")
        names = [f"service-{number}" for number in range(given.services)]
        made: dict[str, Any] = {"services": given.services}
        made["converge"] = await converge(seen, plane, operators, names)
        made["quiet"] = await quiet(given, seen, plane, operators)
        made["takeover"] = await takeover(seen, operators, names)
        if given.faults:
            made["faults"] = await faults(given, seen, plane, operators, names)
        for task in working:
            task.cancel()
    log = operators.log.read_text()
    made["said"] = Counter(re.sub(r"\(.*|-\d+", "", line) for line in log.splitlines())
    return made


async def install(seen: Cluster) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for one in definitions():
        await seen.ask("POST", path, crd(one, rules=False))

    async def known() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return "items" in await seen.get(SERVICES)
        return False

    await until(known)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


async def until(there: Callable[[], Any]) -> float:
    """Seconds until it is true."""
    began = time.monotonic()
    while not await there():
        if time.monotonic() - began > PATIENCE_S:
            raise RuntimeError(f"{there} has not come in {PATIENCE_S} s")
        await asyncio.sleep(0.1)
    return time.monotonic() - began


async def all_ready(seen: Cluster, names: list[str]) -> None:
    async def ready() -> bool:
        return all(name in seen.ready for name in names)

    await until(ready)


async def converge(
    seen: Cluster, plane: ControlPlane, operators: Operators, names: list[str]
) -> dict[str, Any]:
    leader = operators.find(await seen.holder())
    standby = next(one for one in operators.processes if one is not leader)
    processes = {
        "operator": leader,
        "standby": standby,
        "API server": plane.api,
        "etcd": plane.etcd,
    }
    cpu = {name: cpu_s(one) for name, one in processes.items()}
    own, waited, before = time.process_time(), waited_s(leader), await seen.writes()
    began = time.monotonic()
    await asyncio.gather(*(seen.make(name) for name in names))
    made_s = time.monotonic() - began
    say(f"{len(names)} services are made")
    await all_ready(seen, names)
    say("all are ready")
    cpu = {name: round(cpu_s(one) - cpu[name], 2) for name, one in processes.items()}
    cpu["this program"] = round(time.process_time() - own, 2)
    ready = sorted(seen.ready[name] - began for name in names)
    return {
        "seconds": round(ready[-1], 1),
        "seconds until all are made": round(made_s, 1),
        "seconds until half are ready": round(ready[len(ready) // 2], 1),
        "cpu_s": cpu,
        "operator waited for a CPU, s": round(waited_s(leader) - waited, 1),
        "operator cpu_ms per service": round(1e3 * cpu["operator"] / len(names), 2),
        "operator peak_mb": peak_mb(leader),
        "writes": dict(await seen.writes() - before),
        "wrong": await seen.wrong(names),
    }


async def quiet(
    given: argparse.Namespace, seen: Cluster, plane: ControlPlane, operators: Operators
) -> dict[str, Any]:
    await asyncio.sleep(5.0)  # for what is under way
    leader = operators.find(await seen.holder())
    processes = {"leader": leader, "API server": plane.api}
    cpu = {name: cpu_s(one) for name, one in processes.items()}
    before = await seen.writes()
    await asyncio.sleep(given.quiet)
    writes = await seen.writes() - before
    return {
        "seconds": given.quiet,
        "writes": sum(writes.values()),
        "which": dict(writes),
        "cpu_s": {name: round(cpu_s(one) - cpu[name], 2) for name, one in processes.items()},
    }


async def takeover(seen: Cluster, operators: Operators, names: list[str]) -> dict[str, Any]:
    """kill -9 of the leader; a service that is made at the same moment waits for the next one."""
    before, leader = await seen.children(), await seen.holder()
    operators.find(leader).kill()
    killed = time.monotonic()
    await seen.make("after-the-kill")
    names.append("after-the-kill")

    async def another() -> bool:
        return await seen.holder() not in ("", leader)

    async def acts() -> bool:
        made = (await seen.get(SERVICES + "/after-the-kill"))["metadata"]
        return bool(made.get("finalizers"))

    await until(another)
    lease_s = time.monotonic() - killed
    await until(acts)
    acts_s = time.monotonic() - killed
    await all_ready(seen, names)
    ready_s = time.monotonic() - killed
    say("another leads")
    operators.start()  # a standby for the next time
    return {
        "seconds until another holds the Lease": round(lease_s, 1),
        "seconds until it acts": round(acts_s, 1),
        "seconds until the new service is ready": round(ready_s, 1),
        "children made anew": made_anew(before, await seen.children()),
        "new leader cpu_s": round(cpu_s(operators.find(await seen.holder())), 2),
        "wrong": await seen.wrong(names),
    }


def made_anew(before: dict[Any, tuple[str, str]], after: dict[Any, tuple[str, str]]) -> int:
    return sum(after.get(key) != uids for key, uids in before.items())


async def faults(
    given: argparse.Namespace,
    seen: Cluster,
    plane: ControlPlane,
    operators: Operators,
    names: list[str],
) -> dict[str, Any]:
    """Each while the first half of new services is handled and the second is made; times count from its end."""

    async def leader_killed() -> None:
        operators.find(await seen.holder()).kill()
        operators.start()

    async def api_gone() -> None:
        plane.kill_api()
        await asyncio.sleep(given.gone)
        await asyncio.to_thread(plane.start_api)

    async def etcd_silent() -> None:
        with plane.stopped_etcd():
            await asyncio.sleep(given.slow)

    few = max(2, given.services // 10)
    happening = {
        "leader killed": (leader_killed, given.services),
        f"API server gone for {given.gone:g} s": (api_gone, few),
        f"etcd silent for {given.slow:g} s": (etcd_silent, few),
    }
    made = {}
    for at, (name, (happen, count)) in enumerate(happening.items()):
        fresh = [f"fault-{at}-{number}" for number in range(count)]
        say(name)
        made[name] = await through(seen, fresh, names, happen)
    return made


async def through(
    seen: Cluster, fresh: list[str], names: list[str], happen: Callable[[], Any]
) -> dict[str, Any]:
    before, half = await seen.children(), len(fresh) // 2
    first = asyncio.gather(*(seen.make(name) for name in fresh[:half]))

    async def under_way() -> bool:
        return sum(name in seen.ready for name in fresh[:half]) >= half // 4

    await until(under_way)
    there = await seen.children()
    second = asyncio.gather(*(seen.make(name) for name in fresh[half:]))
    await happen()
    ended, waiting = time.monotonic(), sum(name not in seen.ready for name in fresh)
    await asyncio.gather(first, second)
    await all_ready(seen, fresh)
    took_s = time.monotonic() - ended
    names += fresh
    after = await seen.children()
    return {
        "services": len(fresh),
        "not ready when it ended": waiting,
        "seconds until all are ready": round(took_s, 1),
        "children made anew": made_anew(before | there, after),
        "wrong": await seen.wrong(names),
    }


if __name__ == "__main__":
    main()
