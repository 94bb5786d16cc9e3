"""One file on four engines: what each is asked for fits together, and the router's own file can be read again."""

import json
import socket
from pathlib import Path

import msgspec
import pytest
import yaml

from cairn.cli.fleet import fleet_apply
from cairn.cli.main import main
from cairn.cluster import records
from cairn.cluster.backends.catalogue import backend_of
from cairn.cluster.backends.interface import EngineUnreachable
from cairn.cluster.operator.objects import KEDA_API, as_known
from cairn.core.errors import ConfigError
from cairn.fleet.apply import PORT, check_for, job_of, notes_on, objects_of
from cairn.fleet.config import FleetConfig, RouterConfig, ServerGroup, read_fleet
from cairn.fleet.keda import read_metadata
from cairn.fleet.keda_messages import ScaledObject

EXAMPLES = Path(__file__).parents[2] / "examples/fleet"
CONFIG = FleetConfig(
    name="chat",
    router=RouterConfig(policy="lmetric", hold_s=5.0),
    servers=[
        ServerGroup(
            model="a/b", count=3, gpus=2, cpus=4, memory="10GiB", args=["--dtype", "bfloat16"]
        ),
        ServerGroup(urls=["http://10.0.0.1:8000"]),
    ],
)


def named(kind: str) -> dict:
    return {one["metadata"]["name"]: one for one in objects_of(CONFIG) if one["kind"] == kind}


def test_the_router_in_the_cluster_finds_every_server_by_name(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text(named("ConfigMap")["chat-router"]["data"]["fleet.toml"])
    seen = read_fleet(file)
    assert (seen.router.policy, seen.router.hold_s, seen.router.port) == ("lmetric", 5.0, PORT)
    services, servers = named("Service"), seen.servers
    assert servers[1] == CONFIG.servers[1]
    host, port = servers[0].dns.split(":")
    assert services[host]["spec"]["clusterIP"] == "None"
    assert services[host]["spec"]["ports"][0]["port"] == int(port)


def test_services_and_budgets_select_the_pods_that_deployments_make():
    deployments = named("Deployment")
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in deployments.values()]
    selectors = [one["spec"]["selector"] for one in named("Service").values()]
    for one in (*deployments.values(), *named("PodDisruptionBudget").values()):
        selectors.append(one["spec"]["selector"]["matchLabels"])
    for selector in selectors:
        assert sum(selector.items() <= labels.items() for labels in pods) == 1, selector
    container = deployments["chat-servers-0"]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"memory": "10240Mi", "nvidia.com/gpu": "2"}
    assert container["command"][:5] == ["cairn", "serve", "a/b", "--dtype", "bfloat16"]
    assert deployments["chat-servers-0"]["spec"]["replicas"] == 3


def test_a_pool_selects_all_servers_and_asks_the_router():
    made = objects_of(msgspec.structs.replace(CONFIG, inference_pool=True))
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in made}
    spec = by_name["InferencePool", "chat"]["spec"]
    pods = {
        name: one["spec"]["template"]
        for (kind, name), one in by_name.items()
        if kind == "Deployment"
    }
    chosen = spec["selector"]["matchLabels"].items()
    assert [name for name, pod in pods.items() if chosen <= pod["metadata"]["labels"].items()] == [
        "chat-servers-0"
    ]
    without = [one for one in objects_of(CONFIG) if one["kind"] == "Deployment"]
    assert "cairn/serves" not in str(without)  # it would roll the servers of every fleet
    picker = by_name["Service", spec["endpointPickerRef"]["name"]]["spec"]
    assert picker["ports"][0]["port"] == spec["endpointPickerRef"]["port"]["number"]
    assert picker["selector"].items() <= pods["chat-router"]["metadata"]["labels"].items()
    command = pods["chat-router"]["spec"]["containers"][0]["command"]
    assert command[-2:] == ["--endpoint-picker", f"0.0.0.0:{picker['ports'][0]['targetPort']}"]
    assert "InferencePool" not in {
        one["kind"] for one in as_known(made, {"policy/v1/PodDisruptionBudget"})
    }
    known = as_known(made, {"inference.networking.k8s.io/v1/InferencePool"})
    assert "InferencePool" in {one["kind"] for one in known}


def test_every_port_says_its_protocol():
    """By which older API servers know the entries of the list: they refuse to apply one without."""
    ports = [port for one in named("Service").values() for port in one["spec"]["ports"]]
    for one in named("Deployment").values():
        ports += one["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert [port["protocol"] for port in ports] == ["TCP"] * 4


def test_a_job_asks_for_everything_that_the_fleet_starts():
    (role,) = job_of(CONFIG, "/fleet.toml").roles
    assert (role.gpus, role.cpus, role.argv[-1]) == (6, 13.0, "/fleet.toml")


def test_servers_that_come_and_go_have_room_for_all_and_are_scaled_by_keda():
    group = ServerGroup(model="a/b", least=0, most=3, gpus=2, cpus=4)
    config = FleetConfig(name="zero", servers=[group])
    (role,) = job_of(config, "/fleet.toml").roles
    assert (role.gpus, role.cpus) == (6, 13.0)
    assert "3 of scaled groups" in notes_on(config, "ray")[0]
    assert "127.0.0.1 of its node alone" in notes_on(CONFIG, "slurm")[0]
    made = objects_of(config)
    (scaled,) = [one["spec"] for one in made if one["kind"] == "ScaledObject"]
    (trigger,) = scaled["triggers"]
    asked = read_metadata(ScaledObject("zero", metadata=trigger["metadata"]))
    assert (asked.model, asked.least, asked.most) == ("a/b", 0, 3)
    host, port = asked.scalerAddress.replace(".default:", ":").split(":")
    services = {one["metadata"]["name"]: one for one in made if one["kind"] == "Service"}
    assert services[host]["spec"]["ports"][0]["targetPort"] == int(port)
    (router,) = [one for one in made if one["metadata"]["name"] == "zero-router" if "spec" in one]
    command = router["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-2:] == ["--keda", f"0.0.0.0:{port}"]
    for apis, replicas in (({f"{KEDA_API}/ScaledObject"}, None), (set(), 1)):
        known = {one["metadata"]["name"]: one for one in as_known(made, apis) if "spec" in one}
        assert known[scaled["scaleTargetRef"]["name"]]["spec"].get("replicas") == replicas


@pytest.mark.parametrize("engine", ["local", "ray", "slurm", "kubernetes"])
def test_a_dry_run_prints_what_would_be_submitted(engine, capsys):
    file = str(EXAMPLES / ("local.toml" if engine == "local" else "service.toml"))
    assert main(["fleet", "apply", file, "--on", engine, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "cairn" in shown
    assert main(["fleet", "apply", file, "--on", engine, "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["engine"], document["dry_run"]) == (engine, True)
    if engine == "kubernetes":
        assert document["objects"] == list(yaml.safe_load_all(shown))
        kinds = [one["kind"] for one in document["objects"]]
        assert sorted(set(kinds)) == ["ConfigMap", "Deployment", "PodDisruptionBudget", "Service"]
    else:
        assert document["text"] == shown
        assert Path(file).name in shown


def test_a_port_that_is_taken_is_told_before_anything_is_submitted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path / "jobs"))
    file = tmp_path / "fleet.toml"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        file.write_text(
            f'name = "taken"\n[router]\nhost = "127.0.0.1"\nport = {port}\n'
            '[[servers]]\nmodel = "cairn-tiny"\ngpus = 0\n'
        )
        try:
            assert main(["fleet", "apply", str(file)]) == 2
            said = capsys.readouterr()
            assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said.err
            assert "submitted" not in said.out
            assert not list(records.latest())
        finally:
            for record in records.latest():
                backend_of(record).stop(record)


def test_a_server_that_stops_answering_is_no_refusal(tmp_path, monkeypatch):
    """Part of the objects may be there: the hint says what to do about that."""
    kubectl = tmp_path / "kubectl"
    said = "Unable to connect to the server: context deadline exceeded"
    kubectl.write_text(f'#!/bin/sh\n[ "$1" = apply ] || exit 0\necho "{said}" >&2; exit 1\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(EngineUnreachable, match="no answer") as raised:
        fleet_apply.run([str(EXAMPLES / "service.toml"), "--on", "kubernetes"])
    assert "apply it again" in raised.value.hint


def test_a_fleet_without_servers_of_its_own_is_placed_nowhere():
    with pytest.raises(ConfigError, match="nothing to place on slurm"):
        check_for(FleetConfig(servers=[ServerGroup(urls=["http://a:1"])]), "slurm")
