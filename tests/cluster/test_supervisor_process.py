"""What `cairn jobs stop` says of a job whose supervisor is gone."""

import pytest

from cairn.cluster import records, supervisor_process
from cairn.cluster.records import Status
from cairn.cluster.spec import Job, Role


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
    records.write_status(record, Status(state=state, reason="2 of 2 nodes"))
    alive = [True, True, False, False, False]
    monkeypatch.setattr(records, "supervised", lambda record: alive.pop(0) if alive else False)
    monkeypatch.setattr(supervisor_process.os, "kill", lambda pid, number: None)
    gone = records.Record(**{**records_fields(record), "supervisor": 1 << 30})
    supervisor_process.stop(gone)
    status = records.read_status(gone)
    assert (status.state, status.reason) == ("stopped", reason)


def records_fields(record):
    return {name: getattr(record, name) for name in record.__struct_fields__}
