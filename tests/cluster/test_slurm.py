"""Jobs on a real Slurm: three nodes on loopback; a job on two of them, a node that fails, what Slurm refuses."""

import datetime
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
import slurm_rig
from local_job import ended, launch, met, until

from cairn.cluster import records
from cairn.cluster.backends.interface import EngineUnreachable, SubmitFailed
from cairn.cluster.backends.slurm import Slurm
from cairn.cluster.resolve import CannotRun, resolve
from cairn.cluster.spec import Array, Elastic, Job, Restart, Role

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(slurm_rig.why_not() is not None, reason=slurm_rig.why_not() or "Slurm"),
]
WAITING = Path(__file__).with_name("waiting_worker.py")
ELASTIC = Path(__file__).with_name("elastic_worker.py")


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    with slurm_rig.slurm(tmp_path_factory.mktemp("slurm"), 3) as started:
        yield started


@pytest.fixture
def folder(rig, tmp_path, monkeypatch):
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path / "jobs"))
    yield tmp_path
    subprocess.run(["scancel", "--user=root"], check=True)
    until(lambda: not rig.tasks(), "no task of Slurm is left")


def waiting(name, folder, nodes=2, **parts):
    role = Role(
        argv=[sys.executable, str(WAITING), str(folder)],
        nodes=nodes,
        gpus=1,
        ranks=1,
        memory="64MiB",
        start="direct",
    )
    return Job(name=name, roles=[role], time_limit="10m", **parts)


def up(folder, count, ignore=()):
    def found():
        pids = {int(path.name[3:]) for path in folder.glob("up-*")} - set(ignore)
        alive = {pid for pid in pids if psutil.pid_exists(pid)}
        return alive if len(alive) == count else None

    return until(found, f"{count} programs are up")


def test_two_nodes_meet_and_reduce(rig, folder):
    role = Role(
        argv=[sys.executable, str(ELASTIC), str(folder)],
        nodes=2,
        memory="64MiB",
        env={"GLOO_SOCKET_IFNAME": "lo"},
    )
    job = Job(
        name="reduce", roles=[role], elastic=Elastic(last_call="1s"), restart=Restart(grace="1s")
    )
    engine = Slurm()
    record = launch(job, engine)
    assert record.id.isdigit()
    assert [rank["met"] for rank in met(folder, 2)] == [2, 2]
    assert engine.status(record).reason == "2 nodes"
    (folder / "finish").touch()
    assert ended(record, engine).state == "done"
    log = "\n".join(engine.lines(record, follow=False))
    assert "r0| met 2 of 2" in log
    assert "r1| met 2 of 2" in log


def test_a_job_is_requeued_when_a_node_fails(rig, folder):
    engine = Slurm()
    record = launch(waiting("requeue", folder), engine)
    first = up(folder, 2)
    nodes = rig.ask("squeue", "-h", "-j", record.id, "-o", "%N").strip()
    with rig.failed(rig.ask("scontrol", "show", "hostnames", nodes).split()[1]):
        until(lambda: "put back into the queue" in engine.status(record).reason, "it is requeued")
        # Slurm lets a requeued job wait two minutes; an administrator may shorten that, to more than a second (its
        # nodes take back the credential of the old attempt).
        rig.ask("scontrol", "update", f"JobId={record.id}", "StartTime=now+3")
        second = up(folder, 2, ignore=first)  # on the third node and the one that is left
        assert engine.status(record).restarts == 1
        assert not first & second
        (folder / "finish").touch()
        assert ended(record, engine).state == "done"


def test_waiting_has_a_reason_and_stop_leaves_nothing(rig, folder, tmp_path):
    engine = Slurm()
    first = launch(waiting("first", folder, nodes=3), engine)
    up(folder, 3)
    second = launch(waiting("second", folder), engine)
    status = until(
        lambda: (s := engine.status(second)).reason.startswith("waits for nodes") and s, "a reason"
    )
    assert status.state == "queued"
    assert status.reason.endswith(f"; held now: 3 by 'first' ({first.id}, root)")
    after = launch(msgspec.structs.replace(waiting("third", folder), after=["first"]), engine)
    until(lambda: "have to be done before" in engine.status(after).reason, "the dependency is told")
    engine.stop(second)
    assert engine.status(second).state == "stopped"
    engine.stop(first)
    status = ended(after, engine)  # it does not wait for ever
    never = "will never start: a job it waits for has failed"
    assert (status.state, status.reason) == ("failed", never)
    until(lambda: not rig.tasks(), "no task is left")


def test_an_array_runs_every_index_and_a_failure_is_told(rig, folder):
    engine = Slurm()
    code = "import os; assert os.environ['CAIRN_ARRAY_INDEX'] != '1', 'index one fails'"
    role = Role(argv=[sys.executable, "-c", code], memory="64MiB", start="direct")
    record = launch(Job(name="many", roles=[role], array=Array(count=3), time_limit="5m"), engine)
    status = ended(record, engine)
    assert status.state == "failed"
    assert "AssertionError: index one fails" in status.failure


def test_two_roles_are_one_heterogeneous_job(rig, folder):
    first = waiting("roles", folder, nodes=1)
    (role,) = first.roles
    roles = [
        msgspec.structs.replace(role, name="one"),
        msgspec.structs.replace(role, name="two", nodes=2),
    ]
    record = launch(msgspec.structs.replace(first, roles=roles), Slurm())
    up(folder, 3)
    assert sorted(path.read_text() for path in folder.glob("up-*")) == ["one-0", "two-0", "two-1"]
    (folder / "finish").touch()
    assert ended(record, Slurm()).state == "done"


def test_each_elastic_role_meets_at_its_own_first_node(rig, folder):
    """On a port of its own: here all nodes are one host."""
    roles = []
    for name, nodes in (("one", 1), ("two", 2)):
        (folder / name).mkdir()
        argv = [sys.executable, str(ELASTIC), str(folder / name)]
        env = {"GLOO_SOCKET_IFNAME": "lo"}
        roles.append(Role(name=name, argv=argv, nodes=nodes, memory="64MiB", env=env))
    job = Job(
        name="both", roles=roles, elastic=Elastic(last_call="1s"), restart=Restart(grace="1s", max=0)
    )  # fmt: skip
    record = launch(job, Slurm())
    for role in roles:
        ranks = met(folder / role.name, role.nodes)
        assert [rank["met"] for rank in ranks] == [role.nodes] * role.nodes
        (first,) = {rank["host"] for rank in ranks if rank["node"] == f"{role.name}-0"}
        assert {rank["head"] for rank in ranks} == {f"127.0.0.{first[1:]}"}
        (folder / role.name / "finish").touch()
    assert ended(record, Slurm()).state == "done"


def test_ranks_that_fail_send_the_job_back_into_the_queue(rig, folder):
    code = "import sys; sys.exit(0 if '{attempt}' == '1000' else 3)"
    role = Role(argv=[sys.executable, "-c", code], memory="64MiB", start="direct")
    job = Job(name="again", roles=[role], time_limit="5m", restart=Restart(policy="requeue", max=1))
    record = launch(job, Slurm())
    until(lambda: "put back into the queue" in Slurm().status(record).reason, "it is requeued")
    rig.ask("scontrol", "update", f"JobId={record.id}", "StartTime=now+3")
    status = ended(record, Slurm())
    assert (status.state, status.restarts) == ("done", 1)


def test_a_job_goes_on_without_the_node_whose_hardware_failed(rig, folder):
    """Also where ranks that fail are not tried again. The words are planted; all else is Slurm's."""
    code = """
import os
print("on", os.environ["SLURMD_NODENAME"], flush=True)
if "{attempt}" == "0":
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""
    role = Role(argv=[sys.executable, "-c", code], memory="64MiB", start="direct")
    engine = Slurm()
    job = Job(name="ecc", roles=[role], time_limit="5m")
    plan = msgspec.structs.replace(resolve(job, engine.look()), avoid=["n3"])  # on the cordon list
    record = engine.submit(plan, records.create(job, engine.name))
    until(lambda: "put back into the queue" in engine.status(record).reason, "it is requeued")
    rig.ask("scontrol", "update", f"JobId={record.id}", "StartTime=now+3")
    status = ended(record, engine)
    assert (status.state, status.restarts) == ("done", 1)
    log = engine.lines(record, follow=False)
    first, second = (line.split()[-1] for line in log if line.startswith("r0| on"))
    assert {first, second} == {"n1", "n2"}
    shown = rig.ask("scontrol", "show", "job", record.id)
    excluded = re.search(r"ExcNodeList=(\S+)", shown)[1]
    assert set(rig.ask("scontrol", "show", "hostnames", excluded).split()) == {first, "n3"}
    assert f"without {first} from now on: rank 0" in (record.logs / "batch.log").read_text()


def test_a_mistake_of_the_program_is_not_made_again(rig, folder):
    role = Role(
        argv=[sys.executable, "-c", "import no_such_module"], memory="64MiB", start="direct"
    )
    job = Job(name="wrong", roles=[role], time_limit="5m", restart=Restart(policy="requeue", max=3))
    record = launch(job, Slurm())
    status = ended(record, Slurm())
    assert (status.state, status.restarts) == ("failed", 0)
    assert "ModuleNotFoundError" in status.failure
    assert "not tried again: rank 0 on" in (record.logs / "batch.log").read_text()


def test_what_slurm_refuses_is_told_at_once(rig, folder):
    engine = Slurm()
    with pytest.raises(CannotRun, match="no queue 'mian' on slurm") as caught:
        resolve(waiting("queued", folder, queue="mian"), engine.look())
    assert caught.value.hint == "did you mean 'main'?"
    with pytest.raises(CannotRun, match=r"needs 4 nodes of 1 GPUs.*so 3 fit"):
        resolve(waiting("large", folder, nodes=4), engine.look())
    with pytest.raises(SubmitFailed, match=r"[Tt]ime limit"):
        launch(waiting("long", folder, queue="short"), engine)  # one minute is the most there
    assert rig.ask("squeue", "-h") == ""


def test_a_deadline_that_cannot_be_met_drops_the_job(rig, folder):
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=1)
    record = launch(msgspec.structs.replace(waiting("late", folder), deadline=soon), Slurm())
    status = ended(record, Slurm())
    assert (status.state, status.reason) == ("failed", "could not be finished by its deadline")
    assert not list(folder.glob("up-*"))


def test_a_controller_that_does_not_answer(tmp_path, monkeypatch):
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=2\nNodeName=x\n"
    )
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path / "jobs"))
    with pytest.raises(EngineUnreachable, match="sinfo"):
        Slurm().look()
    assert not list(records.latest())
    # A job of which nobody can say anything has not ended: its name is not free, and it can be stopped later.
    record = records.create(waiting("unknown", tmp_path), "slurm")
    record = msgspec.structs.replace(record, id="7")
    for other in (conf, tmp_path / "none.conf"):
        monkeypatch.setenv("SLURM_CONF", str(other))
        with pytest.raises(EngineUnreachable, match=r"squeue|no such file"):
            Slurm().status(record)
