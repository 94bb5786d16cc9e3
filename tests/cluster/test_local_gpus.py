"""GPUs of this machine for several jobs: none is given twice, none is kept by a job that has gone. Needs no GPU."""

import os

import msgspec
import psutil
import pytest

from cairn.cluster import records
from cairn.cluster.backends import local, local_gpus
from cairn.cluster.backends.local import LocalReservation
from cairn.cluster.inventory import ClusterInventory
from cairn.cluster.resolve import resolve
from cairn.cluster.spec import Job, Role


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path))
    monkeypatch.setattr(local, "_gpus", lambda: 4)

    def made(name, nodes, gpus):
        asked = Job(name=name, roles=[Role(argv=["x"], nodes=nodes, gpus=gpus)])
        record = records.create(asked, "local")
        record = msgspec.structs.replace(
            record, supervisor=os.getpid(), supervisor_since=records.start_s(psutil.Process())
        )
        records.save(record)
        return LocalReservation(record), resolve(
            asked, ClusterInventory(engine="local", checked=False)
        )

    return made


def test_no_gpu_is_given_twice_and_a_job_gets_all_or_none(job):
    first, plan = job("first", 1, 3)
    assert first.reserve(plan) is None
    assert first.gpus == {0: [0, 1, 2]}
    second, two = job("second", 2, 1)
    assert second.reserve(two) == (
        "waiting for 2 GPUs at once; 1 of 4 are free, the others are held by 'first'"
    )
    assert not (second.record.folder / local_gpus.HELD).exists()
    small, one = job("small", 1, 1)
    assert small.reserve(one) is None
    assert small.gpus == {0: [3]}
    first.release()
    assert second.reserve(two) is None
    assert second.gpus == {0: [0], 1: [1]}


def test_a_job_without_gpus_waits_for_nobody_and_one_that_was_killed_holds_nothing(job):
    first, plan = job("first", 1, 4)
    assert first.reserve(plan) is None
    none, idle = job("none", 3, 0)
    assert none.reserve(idle) is None
    assert none.gpus == {0: [], 1: [], 2: []}
    second, four = job("second", 4, 1)
    assert "held by 'first'" in second.reserve(four)
    records.save(msgspec.structs.replace(first.record, supervisor_since=1.0))  # another process now
    assert second.reserve(four) is None
    assert second.gpus == {0: [0], 1: [1], 2: [2], 3: [3]}
