"""Traces: the public files are read whole, damaged ones are refused with their line, made-up ones are what they say."""

import pytest
from shared_data import shared

from cairn.cluster.simulate.traces import made_to_measure, read_trace, synthetic
from cairn.core.errors import DataError


def test_philly():
    trace = read_trace(shared("data", "cluster", "philly_sia.csv"), overestimate=2.0)
    assert trace.name == "philly"
    assert len(trace.jobs) == 82_247
    assert sum(job.work for job in trace.jobs) / 3600 == pytest.approx(978_078, abs=30)
    assert sum(job.gpus == 1 for job in trace.jobs) / len(trace.jobs) == pytest.approx(
        0.932, abs=0.001
    )
    assert trace.jobs[0].submit == 0
    assert all(job.limit == 2 * job.duration for job in trace.jobs[:100])


def test_openb_as_jobs():
    trace = read_trace(shared("data", "cluster", "openb_pod_list_default.csv"))
    assert len(trace.jobs) == 8152 - 1088  # pods without a GPU do not wait for one
    assert sum(job.gpus * job.milli for job in trace.jobs) == 6_086_800


def test_generic(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("submit,duration,gpus,user,priority,deadline\n100,60,8,ann,2,400\n90,30,1,,,\n")
    first, second = read_trace(file).jobs
    assert (first.submit, first.gpus, first.user, first.deadline) == (0, 1, "all", None)
    assert (second.submit, second.priority, second.deadline, second.limit) == (10, 2, 310, 60)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no trace known"),
        ("a,b\n1,2\n", "no trace known"),
        ("submit,duration,gpus\n", "no jobs"),
        ("submit,duration,gpus\n1,x,2\n", "line 2"),
        ("submit,duration,gpus\n1,5,1\n1,5\n", "line 3"),
        ("submit,duration,gpus\n1,-5,2\n", "duration -5"),
        ("submit,duration,gpus\nnan,5,2\n", "submit nan"),
        ("submit,duration,gpus,milli\n1,5,2,500\n", "500/1000"),
        ("submit,duration,gpus,least\n1,5,2,3\n", "least 3"),
        ("timestamp,duration,num_gpus,cluster\nyesterday,5,1,x\n", "line 2"),
    ],
)
def test_damaged_files_are_refused_with_the_reason(tmp_path, text, says):
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(DataError, match=says):
        read_trace(file)


def test_no_such_file(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        read_trace(tmp_path / "none.csv")


def test_binary_is_refused(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_bytes(b"\xff\xfe\x00garbage")
    with pytest.raises(DataError, match="cannot read"):
        read_trace(file)


def test_synthetic_is_reproducible_and_fits_its_cluster():
    jobs = synthetic(2000, seed=5).jobs
    assert jobs == synthetic(2000, seed=5).jobs
    assert jobs != synthetic(2000, seed=6).jobs
    cluster, why = made_to_measure(jobs, gpus=8, rack=16)
    hours = jobs[-1].submit / 3600
    load = sum(job.work for job in jobs) / 3600 / hours / cluster.total
    assert 0.7 < load <= 0.95
    assert "--nodes" in why
