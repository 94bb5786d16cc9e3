"""What is shipped to train in containers: closed, whole, in words that `cairn train` and torch elastic understand."""

import contextlib
import io
import re
from pathlib import Path

import yaml

from cairn.cli.main import main
from cairn.cluster.backends.k8s_train import RAY_VERSION
from cairn.cluster.elastic import Rendezvous, agent_argv, agent_env
from cairn.cluster.inventory import ClusterInventory
from cairn.cluster.rank import filled, place
from cairn.cluster.resolve import resolve
from cairn.cluster.spec import Job, Restart, Role

DEPLOY = Path(__file__).parents[2] / "deploy"
NODES = yaml.safe_load((DEPLOY / "compose.train.yaml").read_text())["services"]


def words(command):
    return [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", str(word)) for word in command]


def understood(args):
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = main([*args, "--explain"])
    assert status == 0, err.getvalue()


def test_nothing_is_open_and_nothing_can_be_gained():
    assert NODES.keys() == {"train", "node-0", "node-1"}
    for service in NODES.values():
        assert "ports" not in service
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
        assert service["volumes"] == [
            "runs:/var/cache/cairn"
        ]  # the folder that the image's user owns

        assert service["healthcheck"] == {"disable": True}  # the image's asks a server


def test_one_container_trains():
    understood(words(NODES["train"]["command"]))


def test_with_gpus_it_is_the_other_image_and_a_gpu_for_each_node():
    services = yaml.safe_load((DEPLOY / "compose.train.cuda.yaml").read_text())["services"]
    assert services.keys() == NODES.keys()
    places = place({"WORLD_SIZE": "2", "RANK": "1", "CAIRN_JOB_CHECKPOINTS": "/runs"})
    given = []
    for name, service in services.items():
        assert (service["build"]["target"], service["image"]) == ("cuda", "cairn:cuda")
        args = [filled(word, places) for word in words(service["command"])]
        understood(args if name == "train" else args[1:])
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        given.append(device.get("device_ids", device.get("count")))
    assert given == ["all", ["0"], ["1"]]


def test_two_containers_are_two_nodes_of_one_job():
    places = place({"WORLD_SIZE": "2", "RANK": "1", "CAIRN_JOB_CHECKPOINTS": "/runs"})
    for name in ("node-0", "node-1"):
        service = NODES[name]
        assert service["hostname"] == name
        program, *args = (filled(word, places) for word in service["command"])
        assert program == "cairn"
        understood(args)


def test_the_agents_are_started_as_a_launched_job_starts_them():
    """What compose says by hand is what `cairn.cluster.elastic` would say."""
    node = NODES["node-0"]
    job = Job(name="nodes", roles=[Role(argv=node["command"], nodes=2)], restart=Restart(max=5))
    (group,) = resolve(job, ClusterInventory(engine="local", checked=False)).groups
    rendezvous = Rendezvous(endpoint="node-0:29400", run="nodes", hosted="")
    made = agent_argv(job, group, rendezvous, None, "python")
    written = [*node["entrypoint"], *node["command"]]
    assert set(written) - set(made) <= {"--nnodes=2"}
    env = agent_env(job, group, folder=node["environment"]["CAIRN_JOB_CHECKPOINTS"], loopback=False)
    assert node["environment"].items() <= env.items()


def test_the_image_for_ray_has_the_ray_that_is_asked_for():
    text = (DEPLOY / "Dockerfile.ray").read_text()
    assert f"ray[default]=={RAY_VERSION}" in text
    assert re.findall(r"^USER (\d+)", text, re.MULTILINE)[-1] != "0"
