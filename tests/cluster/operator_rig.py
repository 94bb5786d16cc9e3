"""What tests of the operator share: a client of an API in memory, controllers of two lines, and the kinds."""

from lightkube import AsyncClient, KubeConfig
from lightkube.config import models

from cairn.cluster.operator.api import Api
from cairn.cluster.operator.model import MODEL
from cairn.cluster.operator.objects import API, Ref
from cairn.cluster.operator.run import CHILDREN, OPTIONAL, Operator
from cairn.cluster.operator.train_job import TRAIN_JOB
from cairn.fleet.service import INFERENCE_SERVICE

KINDS = (MODEL, INFERENCE_SERVICE, TRAIN_JOB)
PLURALS = {kind.name: f"{API}/{kind.name.lower()}s" for kind in KINDS}
DEPLOYMENTS, PODS, JOBS = "apps/v1/deployments", "v1/pods", "batch/v1/jobs"
EXTRAS = ("jobset.x-k8s.io/v1alpha2/jobsets", "batch.volcano.sh/v1alpha1/jobs", "ray.io/v1/rayjobs")


def client(store) -> Api:
    cluster, user = models.Cluster(server="http://memory"), models.User(token="t")
    config = KubeConfig.from_one(cluster=cluster, user=user).get()
    return Api(AsyncClient(config=config, transport=store, trust_env=False))


def put(store, kind: str, name: str, spec) -> Ref:
    """A user applies an object."""
    body = {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": spec}
    how = ("PATCH", PLURALS[kind], "default", [name], {"fieldManager": "kubectl", "force": "true"})
    store.write(*how, body, "application/apply-patch+yaml")
    return Ref(API, kind, "default", name)


def remove(store, ref: Ref) -> None:
    store.write("DELETE", PLURALS[ref.kind], "default", [ref.name], {}, {}, "")


def control(store) -> None:
    """Deployments have their replicas and jobs have succeeded, as the cluster's controllers would see to."""
    for key, made in list(store.objects.items()):
        generation = made["metadata"]["generation"]
        if key[0] == DEPLOYMENTS:
            count = made["spec"].get("replicas", 1)
            status = {"observedGeneration": generation} | (
                {"replicas": count, "updatedReplicas": count, "availableReplicas": count}
                if count
                else {}
            )
            store.set_status(key, status)
        elif key[0] == JOBS:
            store.set_status(key, {"succeeded": 1})


def look(store, operator: Operator, skip=()) -> None:
    """Fresh lists for the operator, but for the kinds that its watches are late with."""
    for api, kind in (*[(API, one.name) for one in KINDS], *CHILDREN, *OPTIONAL):
        if kind not in skip:
            plural = f"{api}/{kind.lower()}s"
            found = [
                {**made, "apiVersion": api, "kind": kind}
                for key, made in store.objects.items()
                if key[0] == plural
            ]
            operator.cache.replace(api, kind, found)


def new_operator(api: Api) -> Operator:
    operator = Operator(api, KINDS)
    operator.apis = frozenset({"policy/v1/PodDisruptionBudget"})
    return operator


async def settle(store, operator: Operator, rounds: int = 30) -> int:
    """Until nothing is written any more; the number of rounds."""
    for number in range(rounds):
        look(store, operator)
        before = store.version
        for kind in KINDS:
            for name in list(store.named(PLURALS[kind.name])):
                await operator.handle(Ref(API, kind.name, "default", name))
        control(store)
        if store.version == before:
            return number
    raise AssertionError(f"not settled after {rounds} rounds")
