"""What is said of a job whose supervisor is gone, and of one whose supervisor only seems to be."""

import os

import msgspec
import psutil
import pytest

from cairn.cluster import records, supervisor_process
from cairn.cluster.records import JobStatus
from cairn.cluster.spec import Job, Role
from cairn.core.errors import CairnError


def test_a_launch_that_could_not_be_recorded_does_not_hold_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path))
    job = Job(name="one", roles=[Role(argv=["true"])])
    with monkeypatch.context() as full:
        full.setattr(
            records, "save", lambda record: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
        with pytest.raises(CairnError, match="no space left"):
            records.create(job, "local")
    assert records.create(job, "local").number == 1


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("queued", "stopped before it started"),
        ("running", "stopped; its supervisor ended without a report"),
    ],
)
def test_a_job_that_ran_was_not_stopped_before_it_started(tmp_path, monkeypatch, state, reason):
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path))
    record = records.create(Job(name="one", roles=[Role(argv=["true"])]), "ray")
    records.write_status(record, JobStatus(state=state, reason="2 of 2 nodes"))
    alive = [True, True, False]
    monkeypatch.setattr(records, "supervised", lambda record: alive.pop(0) if alive else False)
    monkeypatch.setattr(supervisor_process.os, "kill", lambda pid, number: None)
    gone = records.JobRecord(**{**records_fields(record), "supervisor": 1 << 30})
    supervisor_process.stop(gone)
    status = records.read_status(gone)
    assert (status.state, status.reason) == ("stopped", reason)


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Of a job that this process looks after."""
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path))
    record = records.create(Job(name="one", roles=[Role(argv=["true"])]), "local")
    records.write_status(record, JobStatus(state="running", reason="2 of 2 nodes"))
    since = records.start_s(psutil.Process())
    return msgspec.structs.replace(record, supervisor=os.getpid(), supervisor_since=since)


def test_a_supervisor_that_ends_while_its_status_is_read_has_not_been_lost(record, monkeypatch):
    def ends_now(record):
        records.write_status(record, JobStatus(state="done", reason="all 2 nodes finished"))
        return False

    monkeypatch.setattr(records, "supervised", ends_now)
    assert records.read_status(record).state == "done"


def test_a_clock_that_is_set_loses_no_supervisor(record, monkeypatch):
    """The kernel counts the start of a process from the boot, whose time of day moves with the clock."""
    before = psutil.Process().create_time()
    boot = psutil.boot_time() + 30.0
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot)
    assert psutil.Process().create_time() == pytest.approx(before + 30.0, abs=0.1)
    assert records.read_status(record).state == "running"
    other = msgspec.structs.replace(record, supervisor_since=record.supervisor_since + 0.02)
    assert records.read_status(other).state == "lost"  # the number belongs to another process


def records_fields(record):
    return {name: getattr(record, name) for name in record.__struct_fields__}
