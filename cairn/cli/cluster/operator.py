"""`cairn operator`: Model, InferenceService and TrainJob objects of a Kubernetes cluster. Prints, decides nothing."""

import asyncio
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn import __version__
from cairn.cli.subverbs import Subverb, dispatch
from cairn.core.config import load

if TYPE_CHECKING:
    from cairn.cluster.operator.crd import Definition

ABOUT = (
    "Cairn's operator for Kubernetes: services, models and training jobs as objects of the cluster."
)

NAMESPACE = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"  # what Kubernetes takes
IMAGE = "^\\S+$"


class OperatorRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work for the cluster that this pod is in, or that KUBECONFIG names, until stopped.

    Several may run: the holder of a Lease acts, the others wait. `cairn operator manifests` has what installs it.
    """

    namespace: str = "*"
    """whose objects are handled; *: all"""
    lease_namespace: str = "default"
    """where the Lease is"""
    lease_s: Annotated[int, msgspec.Meta(ge=1, le=300)] = 10
    """a leader that has gone is followed by another after so long"""
    context: str = ""
    """of the kubeconfig; empty: the current one"""


class OperatorManifests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Write the files that install the CRDs and the operator, as a folder for kustomize or as a Helm chart."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """made where it is not there"""
    form: Literal["kustomize", "helm"] = "kustomize"
    namespace: Annotated[str, msgspec.Meta(pattern=NAMESPACE)] = "cairn-system"
    """of the operator; Helm's is chosen when the chart is installed"""
    image: Annotated[str, msgspec.Meta(pattern=IMAGE)] = "cairn:cpu"
    """with Cairn in it, where the cluster can pull it"""


def run(args: list[str]) -> int:
    return dispatch("operator", ABOUT, SUBVERBS, args)


def run_operator(args: list[str]) -> int:
    options = load(
        OperatorRun, args=args, env_prefix="CAIRN_OPERATOR_RUN_", prog="cairn operator run"
    ).value
    asyncio.run(_lead(options))
    return 0


async def _lead(options: OperatorRun) -> None:
    from cairn.cluster.operator import election
    from cairn.cluster.operator.api import connect
    from cairn.cluster.operator.leader import lead
    from cairn.cluster.operator.manifests import NAME
    from cairn.cluster.operator.model import MODEL
    from cairn.cluster.operator.objects import Ref
    from cairn.cluster.operator.run import Operator
    from cairn.cluster.operator.train_job import TRAIN_JOB
    from cairn.fleet.service import INFERENCE_SERVICE

    kinds = (MODEL, INFERENCE_SERVICE, TRAIN_JOB)
    api = connect(options.namespace, options.context)
    lease = Ref(election.API, election.KIND, options.lease_namespace, NAME)
    me = f"{socket.gethostname()}-{os.getpid()}"
    operator = partial(Operator, api, kinds, _say)
    work = asyncio.create_task(lead(api, lease, me, operator, options.lease_s, _say))
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        _say("stopped")


def run_manifests(args: list[str]) -> int:
    options = load(
        OperatorManifests,
        args=args,
        env_prefix="CAIRN_OPERATOR_MANIFESTS_",
        prog="cairn operator manifests",
    ).value
    from cairn.cluster.operator.manifests import Values, helm_files, kustomize_files

    make = helm_files if options.form == "helm" else kustomize_files
    values = Values(namespace=options.namespace, image=options.image)
    for name, text in make(definitions(), values, __version__).items():
        path = options.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"wrote {options.folder}")
    if options.form == "helm":
        print(
            f"  helm install cairn-operator {options.folder} --namespace {options.namespace} --create-namespace"
        )
    else:
        print(f"  kubectl apply --server-side --kustomize {options.folder}")
    return 0


def definitions() -> "list[Definition]":
    from cairn.cluster.operator.definitions import MODEL, TRAIN_JOB
    from cairn.fleet.service import DEFINITION

    return [MODEL, DEFINITION, TRAIN_JOB]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


SUBVERBS: dict[str, Subverb] = {
    "run": Subverb(run_operator, "handle the objects of a cluster, until stopped"),
    "manifests": Subverb(run_manifests, "the files that install it: kustomize or a Helm chart"),
}
