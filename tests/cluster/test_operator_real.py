"""The operator on a real control plane: real conflicts, garbage collection and Deployments; two of it, one killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("lightkube", reason="needs lightkube (pip install 'cairn-stack[kubernetes]')")

import httpx2
from kube_rig import Kubelet, control_plane, server_version
from lightkube import ApiError, Client, KubeConfig
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition
from lightkube.types import PatchType

from cairn.cli.cluster.operator import definitions
from cairn.cli.main import main
from cairn.cluster.operator.api import _resource as kind_of
from cairn.cluster.operator.crd import crd
from cairn.cluster.operator.objects import API

EXAMPLES = Path(__file__).parents[2] / "examples"
DEPLOYMENT, SERVICE, POD = (
    kind_of("apps/v1", "Deployment"),
    kind_of("v1", "Service"),
    kind_of("v1", "Pod"),
)
ISVC, TRAIN, LEASE = (
    kind_of(API, "InferenceService"),
    kind_of(API, "TrainJob"),
    kind_of("coordination.k8s.io/v1", "Lease"),
)
PATIENCE_S = float(os.environ.get("CAIRN_KUBE_START_S", "60"))
LEASE_S = 3 if PATIENCE_S <= 60 else 15  # an emulated server takes seconds to answer

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kube")
    with (
        control_plane(folder) as path,
        pytest.MonkeyPatch.context() as patch,
        contextlib.closing(
            Client(config=KubeConfig.from_file(str(path)), trust_env=False, timeout=PATIENCE_S)
        ) as client,
    ):
        patch.setenv("KUBECONFIG", str(path))
        has_rules = server_version(path) >= (1, 25)
        for one in definitions():
            client.create(CustomResourceDefinition.from_dict(crd(one, rules=has_rules)))
        wait_for(lambda: list(client.list(ISVC)) == [], "the CRDs")
        kubelet = Kubelet(client, POD)
        kubelet.start()
        operators = [start_operator(folder, at) for at in range(2)]
        try:
            yield client, kubelet, operators
        finally:
            kubelet.stopped.set()
            kubelet.join()
            for one in operators:
                one.kill()
                one.wait()
            for at in range(2):
                print((folder / f"operator-{at}.log").read_text())


def start_operator(folder, at):
    argv = [sys.executable, "-m", "cairn", "operator", "run", "--lease-s", str(LEASE_S)]
    with (folder / f"operator-{at}.log").open("wb") as log:
        return subprocess.Popen(argv, stderr=log, env=dict(os.environ))


def wait_for(there, what, seconds=PATIENCE_S):
    until, last = time.monotonic() + seconds, None
    while time.monotonic() < until:
        try:
            if there():
                return
        except (httpx2.HTTPError, KeyError, TypeError, StopIteration) as error:
            last = error
        time.sleep(0.1)
    raise AssertionError(f"{what} did not come within {seconds} s; {last!r}")


def make(client, kind, name, spec):
    """A server that has just started may say 500 until its admission knows a new kind."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return client.create(kind({"metadata": {"name": name}, "spec": spec}))
        except ApiError as error:
            if error.status.code != 500 or time.monotonic() > until:
                raise
            time.sleep(0.5)


def condition(client, kind, name, type_):
    status = client.get(kind, name).get("status") or {}
    return next(one for one in status["conditions"] if one["type"] == type_)


def is_ready(client, name, kind=ISVC):
    return condition(client, kind, name, "Ready")["status"] == "True"


def names(client, kind):
    return {one.metadata.name for one in client.list(kind)}


def test_a_service_lives_scales_and_dies_while_leaders_change(cluster):
    client, _, operators = cluster
    make(client, ISVC, "chat", {"servers": [{"model": "m", "count": 2}]})
    wait_for(lambda: is_ready(client, "chat"), "Ready")
    assert {"chat-router", "chat-servers-0"} <= names(client, DEPLOYMENT)
    before = {one.metadata.name: one.metadata.uid for one in client.list(DEPLOYMENT)}

    leader = client.get(LEASE, "cairn-operator")["spec"]["holderIdentity"]
    (victim,) = [one for one in operators if leader.endswith(f"-{one.pid}")]
    victim.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    wait_for(
        lambda: client.get(LEASE, "cairn-operator")["spec"]["holderIdentity"] != leader, "another"
    )
    print(f"taken over after {time.monotonic() - killed:.1f} s with a Lease of {LEASE_S} s")

    scale = {"spec": {"replicas": 3}}
    client.patch(ISVC, "chat", scale, patch_type=PatchType.MERGE)
    wait_for(
        lambda: client.get(DEPLOYMENT, "chat-servers-0")["status"]["availableReplicas"] == 3,
        "three servers",
    )
    wait_for(lambda: is_ready(client, "chat"), "Ready again")
    after = {one.metadata.name: one.metadata.uid for one in client.list(DEPLOYMENT)}
    assert before == after  # no child was made twice

    versions = [
        one.metadata.resourceVersion for one in (client.get(ISVC, "chat"), *client.list(DEPLOYMENT))
    ]
    time.sleep(2 * LEASE_S)
    assert versions == [
        one.metadata.resourceVersion for one in (client.get(ISVC, "chat"), *client.list(DEPLOYMENT))
    ]

    client.delete(ISVC, "chat")
    wait_for(lambda: "chat" not in names(client, ISVC), "the end")
    wait_for(
        lambda: not {"chat-router", "chat-servers-0"} & names(client, DEPLOYMENT), "its children's"
    )


def test_a_deployment_that_somebody_edits_is_put_right(cluster):
    client, *_ = cluster
    make(client, ISVC, "edited", {"servers": [{"model": "m"}]})
    wait_for(lambda: is_ready(client, "edited"), "Ready")
    client.patch(
        DEPLOYMENT,
        "edited-servers-0",
        {"spec": {"replicas": 4}},
        patch_type=PatchType.MERGE,
        field_manager="somebody",
    )
    wait_for(lambda: client.get(DEPLOYMENT, "edited-servers-0")["spec"]["replicas"] == 1, "one")
    client.delete(SERVICE, "edited")
    wait_for(lambda: "edited" in names(client, SERVICE), "its Service")


def test_a_gang_of_pods_starts_again_and_ends(cluster):
    client, kubelet, _ = cluster
    spec = {
        "image": "i",
        "roles": [{"argv": ["cairn", "train"], "nodes": 2}],
        "restart": {"max": 1},
    }
    make(client, TRAIN, "gang", spec)
    pods = {"gang-worker-0-0", "gang-worker-0-1"}
    wait_for(lambda: names(client, POD) >= pods, "its pods")
    uids = {client.get(POD, name).metadata.uid for name in pods}
    kubelet.ends["gang-worker-0-1"] = 1
    wait_for(lambda: client.get(TRAIN, "gang")["status"]["attempt"] == 1, "a second attempt")
    kubelet.ends.clear()
    wait_for(lambda: names(client, POD) >= pods, "new pods")
    wait_for(
        lambda: not uids & {client.get(POD, name).metadata.uid for name in pods}, "only new ones"
    )
    kubelet.ends = dict.fromkeys(pods, 0)
    wait_for(lambda: condition(client, TRAIN, "gang", "Complete")["status"] == "True", "success")


def test_bad_specs_are_refused_by_the_server_or_by_a_condition(cluster):
    client, *_ = cluster
    with pytest.raises(ApiError, match="cpus"):
        make(client, ISVC, "bad", {"servers": [{"model": "m", "cpus": 0}]})
    try:
        make(client, ISVC, "both", {"servers": [{"model": "m", "dns": "a:1"}]})
    except ApiError as error:  # a server that knows CEL
        if "exactly one" not in str(error):
            raise
        return
    wait_for(lambda: condition(client, ISVC, "both", "Valid")["status"] == "False", "a condition")


def test_fleet_apply_places_the_example_for_real(cluster, tmp_path, capsys):
    client, *_ = cluster
    file = tmp_path / "service.toml"
    text = (EXAMPLES / "fleet/service.toml").read_text()
    file.write_text(text.replace("gpus = 1", "gpus = 0"))
    argv = ["fleet", "apply", str(file), "--on", "kubernetes"]
    assert main(argv) == 0
    wait_for(
        lambda: client.get(DEPLOYMENT, "chat-servers-0")["status"]["availableReplicas"] == 4, "four"
    )
    assert main(argv) == 0  # a second time changes nothing
    file.write_text(file.read_text().replace('name = "chat"', 'name = "operated"'))
    assert main([*argv, "--operator"]) == 0
    wait_for(lambda: is_ready(client, "operated"), "Ready")
    assert "serverside-applied" in capsys.readouterr().out
