"""Jobs on a real Ray: five nodes on this host with a GPU each that is only a number; a real node is really killed."""

import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from local_job import ended, has_ended, launch, left, met, until

from cairn.cluster import records, supervisor_process
from cairn.cluster.backends.interface import EngineUnreachable
from cairn.cluster.backends.ray import Ray
from cairn.cluster.backends.ray_placement import connect
from cairn.cluster.resolve import CannotRun, resolve
from cairn.cluster.spec import Elastic, Job, Restart, Role, Topology

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'ray>=2.50'")

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # Ray's own warnings
WAITING = Path(__file__).with_name("waiting_worker.py")
ELASTIC = Path(__file__).with_name("elastic_worker.py")
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 4,
}


class FiveNodes:
    def __init__(self, cluster, nodes):
        self.cluster, self.nodes = cluster, nodes
        self.address = cluster.address

    def groups(self):
        """The placement groups of our jobs that Ray holds, by state."""
        from ray.util import placement_group_table

        table = placement_group_table().values()
        return [group for group in table if group["state"] != "REMOVED"]


@pytest.fixture(scope="module")
def five():
    from ray.cluster_utils import Cluster

    node = {
        "num_cpus": 1,
        "num_gpus": 1,
        "object_store_memory": 80 << 20,
        "include_dashboard": False,
    }
    head = {**node, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    racks = [{"labels": {"rack": "r0" if number < 1 else "r1"}} for number in range(4)]
    nodes = [cluster.head_node] + [cluster.add_node(wait=False, **node, **rack) for rack in racks]
    cluster.wait_for_nodes(timeout=120)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield FiveNodes(cluster, nodes)
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path / "jobs"))
    yield tmp_path
    for record in records.latest():
        supervisor_process.stop(record)
    until(lambda: not left(tmp_path), "nothing is left")


class OnRay(Ray):
    """As `--on ray`, but this process is connected already and stays so."""

    def look(self):
        from cairn.cluster.backends.ray import nodes_of
        from cairn.cluster.inventory import ClusterInventory

        return ClusterInventory(engine="ray", nodes=nodes_of(ray.nodes()), shares_nodes=True)


def gang(name, folder, nodes, gpus=1, **parts):
    role = Role(
        argv=[sys.executable, str(WAITING), str(folder)],
        nodes=nodes,
        gpus=gpus,
        ranks=1,
        cpus=0.5,
        memory="64MiB",
        start="direct",
    )
    parts.setdefault("restart", Restart(grace="1s"))
    return Job(name=name, roles=[role], time_limit="10m", **parts)


def up(folder, count):
    def found():
        pids = [int(path.name[3:]) for path in folder.glob("up-*")]
        alive = [pid for pid in pids if psutil.pid_exists(pid)]
        return sorted(alive) if len(alive) == count else None

    return until(found, f"{count} programs are up")


def placed(five, name):
    """bundle -> node of a job's placement group"""
    (group,) = [g for g in five.groups() if g["name"] == f"cairn-{name}"]
    return group["bundles_to_node_id"]


def test_a_gang_is_placed_whole_or_not_at_all_and_moves_to_the_spare(five, folder, tmp_path):
    engine = OnRay(five.address)
    first = launch(gang("first", folder, 4), engine)
    pids = up(folder, 4)
    nodes = placed(five, "first")
    assert len(set(nodes.values())) == 4  # one GPU each: four machines

    other = tmp_path / "other"
    other.mkdir()
    second = launch(gang("second", other, 2), engine)  # one node is free, two are asked for
    status = until(
        lambda: (s := engine.status(second)).reason.startswith("waiting") and s, "it waits"
    )
    assert status.state == "queued"
    assert "2 nodes of 1 GPUs" in status.reason
    assert not list(other.glob("up-*"))  # not one of two
    engine.stop(second)
    assert engine.status(second).state == "stopped"
    until(lambda: len(five.groups()) == 1, "the placement group that waited is gone")

    killed = next(n for n in five.nodes[1:] if n.node_id in nodes.values())
    five.cluster.remove_node(killed, allow_graceful=False)
    again = until(lambda: (now := up(folder, 4)) != pids and now, "the job runs on the spare")
    assert len(set(again) & set(pids)) == 3  # the healthy ones were left alone
    now = until(
        lambda: (p := placed(five, "first")) and killed.node_id not in p.values() and p, "moved"
    )
    assert len(set(now.values())) == 4
    assert engine.status(first).restarts == 1

    (folder / "finish").touch()
    assert ended(first, engine).state == "done"
    until(lambda: not five.groups(), "no placement group is left")
    log = "\n".join(engine.lines(first, follow=False))
    assert log.count("| up on worker-") == 5  # four, and the one that came again


def test_ranks_meet_through_torch_elastic_and_a_killed_supervisor_leaves_nothing(five, folder):
    """Neither ranks nor a daemon that each of them has started in a session of its own."""
    engine = OnRay(five.address)
    daemon = f"touch {folder}/daemon-$$; exec sleep 1000"
    program = f"setsid sh -c '{daemon}' & exec {sys.executable} {ELASTIC} {folder}"
    role = Role(argv=["sh", "-c", program], nodes=2, cpus=0.5, memory="64MiB")
    job = Job(
        name="ranks", roles=[role], elastic=Elastic(last_call="1s"), restart=Restart(grace="1s")
    )
    record = launch(job, engine)
    ranks = met(folder, 2)
    assert {rank["node"] for rank in ranks} == {"worker-0", "worker-1"}
    psutil.Process(record.supervisor).kill()
    until(lambda: not any(psutil.pid_exists(r["pid"]) for r in ranks), "the ranks are gone")
    daemons = [int(path.name.partition("-")[2]) for path in folder.glob("daemon-*")]
    assert len(daemons) == 2
    until(lambda: all(has_ended(pid) for pid in daemons), "their daemons are gone")
    until(lambda: not five.groups(), "and so is the placement group")
    assert until(lambda: engine.status(record).state == "lost", "the record says so")


def test_a_failing_program_is_told_and_nothing_is_left(five, folder):
    engine = OnRay(five.address)
    record = launch(gang("failing", folder, 2, restart=Restart(policy="fail", grace="1s")), engine)
    up(folder, 2)
    (folder / "fail").touch()
    status = ended(record, engine)
    assert status.state == "failed"
    assert "RuntimeError: told to fail" in status.failure
    until(lambda: not five.groups(), "no placement group is left")


def test_one_rack_where_the_program_was_launched_and_nothing_of_it_is_left(
    five, folder, monkeypatch
):
    """Three nodes in rack r1, of five; a relative path is meant from here; a daemon goes with its node."""
    monkeypatch.chdir(folder)
    code = """
import os, pathlib, subprocess, sys
forgotten = [sys.executable, "-c", "import time; time.sleep(1000)", os.getcwd()]
pid = subprocess.Popen(forgotten, start_new_session=True, stdout=-3, stderr=-3).pid
pathlib.Path(f"forgotten-{pid}").touch()
"""
    engine = OnRay(five.address)
    job = gang("near", folder, 2, topology=Topology(required="rack"))
    (role,) = job.roles
    role = msgspec.structs.replace(role, argv=[sys.executable, "-c", code])
    record = launch(msgspec.structs.replace(job, roles=[role]), engine)
    assert ended(record, engine).state == "done"
    (group,) = [
        group
        for group in ray.util.placement_group_table().values()
        if group["name"] == "cairn-near"
    ]
    racks = {node["NodeID"]: node["Labels"].get("rack") for node in ray.nodes()}
    assert {racks[node] for node in group["bundles_to_node_id"].values()} == {"r1"}
    pids = [int(path.name.partition("-")[2]) for path in folder.glob("forgotten-*")]
    assert len(pids) == 2
    assert all(has_ended(pid) for pid in pids)


def test_what_can_never_be_placed_is_refused_with_the_numbers(five, tmp_path):
    with pytest.raises(CannotRun, match="needs 9 nodes of 1 GPUs"):
        resolve(gang("large", tmp_path, 9), OnRay(five.address).look())
    with pytest.raises(CannotRun, match=r"needs 4 nodes of 1 GPUs.* nodes in one rack"):
        resolve(
            gang("far", tmp_path, 4, topology=Topology(required="rack")),
            OnRay(five.address).look(),
        )
    with pytest.raises(CannotRun, match="has no queues"):
        resolve(gang("queued", tmp_path, 1, queue="gold"), OnRay(five.address).look())


def test_no_ray_at_that_address():
    with pytest.raises(EngineUnreachable, match=r"no Ray cluster answers at '127.0.0.1:1'"):
        connect("127.0.0.1:1")
