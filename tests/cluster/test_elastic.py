"""Ranks through torch elastic, for real: a killed rank, a killed node, a node that comes back, a killed store host."""

import os
import signal

import msgspec
import psutil
import pytest
from local_job import agent_of, elastic_job, ended, launch, left, met, until

from cairn.cluster import records, supervisor_process
from cairn.cluster.spec import Elastic, Restart

pytestmark = pytest.mark.timeout(600)  # every rank imports torch, and the machine may be busy


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path / "jobs"))
    yield tmp_path
    for record in records.latest():
        supervisor_process.stop(record)
    until(lambda: not left(tmp_path), f"nothing is left: {left(tmp_path)}")


def test_a_killed_rank_a_lost_node_and_one_that_comes_back(folder):
    """kill -9 of one rank, then of a whole node (shrink), which then comes back (regrow)."""
    job = elastic_job(
        "elastic",
        folder,
        (1, 2),
        elastic=Elastic(last_call="1s", regrow_after="10s"),
        restart=Restart(policy="shrink", max=5, grace="1s"),
    )
    record = launch(job)
    first = met(folder, 2)
    assert [rank["met"] for rank in first] == [2, 2]

    os.kill(first[1]["pid"], signal.SIGKILL)  # one rank: both come back, with a store of their own
    second = met(folder, 2, ignore={rank["pid"] for rank in first})
    assert {rank["master"] for rank in first} != {rank["master"] for rank in second}

    os.kill(agent_of(second[0]), signal.SIGKILL)  # the node of rank 0: the other goes on alone
    until(lambda: not psutil.pid_exists(second[0]["pid"]), "the ranks of a lost node die with it")
    seen = {rank["pid"] for rank in first + second}
    alone = met(folder, 1, ignore=seen, alive=False)
    assert alone[0]["node"] == second[1]["node"]
    assert records.read_status(record).restarts == 1

    both = met(folder, 2, ignore=seen | {alone[0]["pid"]})  # the node is asked for again
    assert {rank["node"] for rank in both} == {"worker-0", "worker-1"}
    (folder / "finish").touch()
    status = ended(record)
    assert (status.state, status.restarts) == ("done", 1)


LONG = pytest.mark.skipif(
    not os.environ.get("CAIRN_ELASTIC_LONG"), reason="CAIRN_ELASTIC_LONG=1 runs it"
)


@LONG
def test_a_node_of_a_fixed_gang_is_replaced_and_a_killed_supervisor_leaves_no_rank(folder):
    record = launch(elastic_job("fixed", folder, 2))
    first = met(folder, 2)
    os.kill(agent_of(first[1]), signal.SIGKILL)
    second = met(folder, 2, ignore={rank["pid"] for rank in first})
    assert {rank["node"] for rank in second} == {"worker-0", "worker-1"}

    os.kill(record.supervisor, signal.SIGKILL)
    until(lambda: not any(psutil.pid_exists(r["pid"]) for r in second), "no rank is left")
    until(lambda: records.read_status(record).state == "lost", "the record says so")
    assert "was killed" in records.read_status(record).reason


@LONG
def test_a_lost_store_is_made_anew(folder):
    record = launch(elastic_job("store", folder, 2))
    first = met(folder, 2)
    supervisor = psutil.Process(record.supervisor)
    stores = [p for p in supervisor.children() if "TCPStore" in " ".join(p.cmdline())]
    assert len(stores) == 1
    stores[0].kill()
    second = met(folder, 2, ignore={rank["pid"] for rank in first})
    assert {int(rank["attempt"]) // 1000 for rank in second} == {1}
    (folder / "finish").touch()
    assert ended(record).state == "done"


def test_the_first_failing_rank_is_told_once_with_its_host_and_collective(folder):
    job = elastic_job("failing", folder, 1, restart=Restart(policy="fail", grace="1s"))
    role = msgspec.structs.replace(job.roles[0], ranks=2)
    record = launch(msgspec.structs.replace(job, roles=[role]))
    met(folder, 2)
    (folder / "fail-1").touch()
    status = ended(record)
    assert status.state == "failed"
    assert "rank 1 on" in status.reason
    assert status.failure.count("Traceback") == 1
    assert "RuntimeError: rank 1 was told to fail" in status.failure
    assert "last collective: none" in status.failure
