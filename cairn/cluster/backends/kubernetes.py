"""Kubernetes as an engine: renders the objects, and hands them to kubectl.

    Plan -objects-> YAML -kubectl create-> the cluster's own queue and controllers -kubectl get-> one line

What a job becomes is decided by the target: jobset (with Kueue, the default), volcano, rayjob; a server is a Deployment
or a LeaderWorkerSet. Restarts, quotas and placement are theirs, never done here again.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from cairn.cluster import records
from cairn.cluster.backends.interface import EngineMissing, EngineUnreachable, SubmitFailed
from cairn.cluster.backends.k8s_pod import TOPOLOGY_KEYS, Object, secret_objects
from cairn.cluster.backends.k8s_serve import serving_objects
from cairn.cluster.backends.k8s_status import status_of
from cairn.cluster.backends.k8s_train import jobset_objects, rayjob_objects, volcano_objects
from cairn.cluster.inventory import ClusterInventory, ClusterNode
from cairn.cluster.records import JobRecord, JobStatus
from cairn.cluster.resolve import CannotRun, JobPlan
from cairn.cluster.secret_env import write_private
from cairn.core.rank_failure import first_of, found_in, report

TARGETS = {"jobset": jobset_objects, "volcano": volcano_objects, "rayjob": rayjob_objects}
QUEUES = {
    "jobset": "localqueues.kueue.x-k8s.io",
    "rayjob": "localqueues.kueue.x-k8s.io",
    "volcano": "queues.scheduling.volcano.sh",
}
PATIENCE = "--request-timeout=20s"
LONGEST_NAME = 63
SUFFIXES = {
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "m": 1e-3,
}


class Kubernetes:
    """`--on kubernetes`; `context` is kubectl's."""

    name = "kubernetes"

    def __init__(self, target: str = "jobset", context: str = "") -> None:
        self.target, self.context = target, context

    def look(self) -> ClusterInventory:
        if shutil.which("kubectl") is None:
            raise EngineMissing(
                "kubectl is not installed here",
                hint="install it, or look at the objects with --dry-run",
            )
        forbidden: list[Object] = []
        listed = self._get("nodes", forbidden=forbidden)
        nodes = [node_of(item) for item in listed]
        queues = self._get(QUEUES[self.target], missing=[])
        names = [queue["metadata"]["name"] for queue in queues]
        if not nodes:
            why = "nodes may not be listed" if listed is forbidden else "the cluster has no nodes"
            print(f"note: {why}, so the job's size is not checked", file=sys.stderr)
        return ClusterInventory(
            engine=self.name,
            nodes=nodes,
            queues=names,
            needs_image=True,
            shares_nodes=True,
            checked=bool(nodes),
        )

    def unseen(self) -> ClusterInventory:
        return ClusterInventory(engine=self.name, queues=[], needs_image=True, checked=False)

    def render(self, plan: JobPlan) -> str:
        return to_yaml(objects(plan, self.target))

    def submit(self, plan: JobPlan, record: JobRecord) -> JobRecord:
        manifests = objects(plan, self.target)
        write_private(record.folder / "objects.yaml", to_yaml(manifests).encode())
        record = msgspec.structs.replace(record, id=_id(manifests))
        records.save(record)
        done = self._kubectl("create", "--filename=-", stdin=to_yaml(manifests))
        if done.returncode != 0:
            if "AlreadyExists" in done.stderr:  # what was there before is not ours to take away
                raise SubmitFailed(
                    f"Kubernetes has '{plan.job.name}' already, and this machine did not launch it",
                    hint="give the job another name",
                )
            self._kubectl("delete", "--ignore-not-found", "--filename=-", stdin=to_yaml(manifests))
            lines = done.stderr.strip().splitlines()
            if missing := _missing_kind(done.stderr):
                raise SubmitFailed(
                    f"this cluster has no {missing}, which the target {self.target} needs",
                    hint="install its CRD and controller, choose another --target, or give the job to `cairn operator` "
                    "as a TrainJob, which needs neither",
                )
            raise SubmitFailed(
                f"Kubernetes refused the job: {lines[-1] if lines else done.returncode}",
                hint=f"the objects are in {record.folder / 'objects.yaml'}",
            )
        return record

    def status(self, record: JobRecord) -> JobStatus:
        last = records.read_status(record)
        if (
            last.state in records.ENDED
        ):  # stopped, or never submitted: an object of its name is not ours
            return last
        resources = self._get(record.id, missing=[])
        if not resources:
            return JobStatus(state="lost", reason=f"{record.id} is not in the cluster any more")
        pods = self._get("pods", f"--selector=cairn/job={record.name}")
        workloads = (
            self._get("workloads.kueue.x-k8s.io", missing=[]) if self.target != "volcano" else []
        )
        own = [w for w in workloads if _owned(w, record.name)]
        status = status_of(resources[0], pods, own)
        if status.state == "failed":
            failure = first_of(found_in(self.lines(record, follow=False)))
            status = msgspec.structs.replace(status, failure=report(failure) if failure else "")
        if status.state in ("done", "failed"):  # the object is taken away a day later
            records.write_status(record, status)
        return status

    def lines(self, record: JobRecord, follow: bool) -> Iterator[str]:
        words = [
            "logs",
            f"--selector=cairn/job={record.name}",
            "--tail=-1",
            "--max-log-requests=64",
        ]
        process = subprocess.Popen(
            self._words(*words, *(["--follow"] if follow else [])),
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.DEVNULL,
            errors="replace",
        )
        assert process.stdout is not None
        with process:
            yield from (line.rstrip("\n") for line in process.stdout)

    def stop(self, record: JobRecord) -> None:
        path = record.folder / "objects.yaml"
        done = self._kubectl("delete", "--ignore-not-found", "--wait", f"--filename={path}")
        if done.returncode != 0:
            raise EngineUnreachable(f"kubectl could not delete {record.id}: {done.stderr.strip()}")
        records.write_status(
            record, JobStatus(state="stopped", reason="stopped by `cairn jobs stop`")
        )

    def _get(
        self,
        *words: str,
        missing: list[Object] | None = None,
        forbidden: list[Object] | None = None,
    ) -> list[Object]:
        """`missing`: the answer where there is no such thing; `forbidden`: where we may not ask."""
        done = self._kubectl("get", *words, "--output=json", PATIENCE)
        if done.returncode == 0:
            document: dict[str, Any] = json.loads(done.stdout)
            return document["items"] if document.get("kind") == "List" else [document]
        gone = any(word in done.stderr for word in ("NotFound", "doesn't have a resource type"))
        if missing is not None and gone:
            return missing
        if forbidden is not None and "(Forbidden)" in done.stderr:
            return forbidden
        lines = done.stderr.strip().splitlines()
        raise EngineUnreachable(
            f"kubectl gets no answer: {lines[-1] if lines else done.returncode}",
            hint="`kubectl config get-contexts` has the clusters; --address CONTEXT chooses one",
        )

    def _kubectl(self, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._words(*words), input=stdin, capture_output=True, text=True, check=False
        )

    def _words(self, *words: str) -> list[str]:
        return ["kubectl", *([f"--context={self.context}"] if self.context else []), *words]


def objects(plan: JobPlan, target: str) -> list[Object]:
    """Objects to create, in this order. Pure."""
    _check_names(plan)
    folder = plan.job.checkpoint.folder
    if folder is not None and not folder.startswith("/"):
        raise CannotRun(
            f"checkpoint.folder is '{folder}', and in a pod it is a place from the root",
            hint=f"folder = '/{folder}'",
        )
    if plan.job.kind == "serve":
        if len(plan.groups) > 1:
            raise CannotRun(
                f"server '{plan.job.name}' has {len(plan.groups)} roles; on kubernetes it has one",
                hint="launch each role as a job of its own",
            )
        return [*secret_objects(plan), *serving_objects(plan)]
    return [*secret_objects(plan), *TARGETS[target](plan)]


def _check_names(plan: JobPlan) -> None:
    """A pod's name is a name in DNS: job, role and two numbers have to fit into it."""
    for group in plan.groups:
        longest = f"{plan.job.name}-{group.role}-0-{group.most - 1}"
        if len(longest) > LONGEST_NAME:
            raise CannotRun(
                f"a pod of role '{group.role}' would be called {longest}: {len(longest)} characters, "
                f"{LONGEST_NAME} are allowed",
                hint="shorten the name of the job or of the role",
            )


def to_yaml(manifests: list[Object]) -> str:
    import yaml

    class PlainDumper(yaml.SafeDumper):
        """YAML dumper without anchors, because `&id001` is hard to read."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    dumped = (yaml.dump(each, Dumper=PlainDumper, sort_keys=False, width=120) for each in manifests)
    return "---\n".join(dumped)


def node_of(item: Object) -> ClusterNode:
    """Capacity of a node from `kubectl get nodes`."""
    has = item["status"].get("allocatable", {})
    marks = item["metadata"].get("labels", {})
    slices = {
        name.removeprefix("nvidia.com/mig-"): int(count)
        for name, count in has.items()
        if name.startswith("nvidia.com/mig-")
    }
    return ClusterNode(
        name=item["metadata"]["name"],
        cpus=quantity(has.get("cpu", "0")),
        mig=slices,
        memory=int(quantity(has.get("memory", "0"))),
        gpus=int(has.get("nvidia.com/gpu", 0)),
        domains={level: marks[key] for level, key in TOPOLOGY_KEYS.items() if key in marks},
    )


def quantity(text: str) -> float:
    """Kubernetes's numbers: 500m, 16Gi, 8."""
    for suffix, factor in SUFFIXES.items():
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * factor
    return float(text)


def _missing_kind(stderr: str) -> str | None:
    """The kind that the API server does not know, as kubectl names it."""
    match = re.search(r'no matches for kind "(\w+)" in version "([^"]+)"', stderr)
    return f"{match[1]} ({match[2]})" if match else None


def _id(manifests: list[Object]) -> str:
    """`jobset.jobset.x-k8s.io/train-tiny`: what kubectl takes for the object that is the job."""
    main = next(each for each in manifests if each["kind"] not in ("ConfigMap", "Secret"))
    group, _, version = main["apiVersion"].rpartition("/")
    kind = main["kind"].lower()
    return (
        f"{kind}.{version}.{group}/{main['metadata']['name']}"
        if group
        else f"{kind}/{main['metadata']['name']}"
    )


def _owned(workload: Object, name: str) -> bool:
    owners = workload.get("metadata", {}).get("ownerReferences", [])
    return any(owner.get("name") == name for owner in owners)
