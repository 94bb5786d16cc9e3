"""Traces: the public files are read whole, damaged ones are refused with their line, made-up ones are what they say."""

import time

import pytest
from msgspec.structs import replace
from shared_data import shared

from cairn.cluster.simulate.jobs import SimulatedCluster, SimulatedJob
from cairn.cluster.simulate.policies import POLICIES
from cairn.cluster.simulate.replay import replay
from cairn.cluster.simulate.summary import summarise
from cairn.cluster.simulate.traces import kept_busy, made_to_measure, read_trace, synthetic
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
        ("submit,duration,gpus\nnan,5,2\n", "submit is nan"),
        ("submit,duration,gpus\n1,5,1\n\n1,5,2,3,4\n", "line 4 has 5 values, the header 3"),
        ('submit,duration,gpus\n1,"5,1\n', "cannot read"),
        ("submit,duration,gpus\n1,5,1.5\n", "gpus is 1.5, not a whole number"),
        ("submit,duration,gpus\n1,5,\n", "gpus is '', not a number"),
        ("submit,duration,gpus\n1,5,-2\n", "-2 GPUs"),
        ("submit,duration,gpus\n1,1e300,2\n", "duration 1e.300 s"),
        ("submit,duration,gpus,id\n1,5,2,7\n3,5,2,7\n", "line 3: job 7 was in line 2 already"),
        ("submit,duration,gpus,cpus\n1,5,2,-1\n", "-1 CPUs"),
        ("submit,duration,gpus,deadline\n9,5,2,4\n", "deadline 4, before it is submitted at 9"),
        ("submit,duration,gpus,deadline\n9,5,2,nan\n", "deadline is nan"),
        ("submit,duration,gpus,priority\n9,5,2,high\n", "priority is 'high', not a number"),
        ("timestamp,duration,num_gpus,cluster\n2017-10-09 07:01:55,-5,1,x\n", "duration -5"),
        (
            "num_gpu,gpu_milli,cpu_milli,creation_time,deletion_time\n1,500,1000,9,3\n",
            "deleted at 3, before it was created at 9",
        ),
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


def test_a_file_as_a_spreadsheet_writes_it(tmp_path):
    """A byte order mark, spaces in the header, Windows line ends, empty lines."""
    file = tmp_path / "mine.csv"
    file.write_bytes(b"\xef\xbb\xbfsubmit, duration, gpus\r\n5,60,2\r\n\r\n9, 30 ,1\r\n")
    assert [(job.submit, job.duration, job.gpus) for job in read_trace(file).jobs] == [
        (0, 60, 2),
        (4, 30, 1),
    ]


def test_philly_is_read_alike_in_every_time_zone(tmp_path, monkeypatch):
    """A night on which clocks were put back, once with the hour that came twice."""
    file = tmp_path / "philly.csv"
    file.write_text(
        "timestamp,duration,num_gpus,gpu_time,cluster\n"
        "2017-11-05 00:30:00,60,1,60,a\n2017-11-05 03:30:00,60,1,60,a\n"
    )
    try:
        for zone in ("UTC", "PST8PDT,M3.2.0,M11.1.0"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            assert [job.submit for job in read_trace(file).jobs] == [0, 3 * 3600]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_synthetic_is_reproducible():
    jobs = synthetic(2000, seed=5).jobs
    assert jobs == synthetic(2000, seed=5).jobs
    assert jobs != synthetic(2000, seed=6).jobs


def test_the_offered_load_is_work_over_time():
    jobs = synthetic(2000, seed=5).jobs
    cluster, _ = made_to_measure(jobs, gpus=8, rack=16)
    hours = jobs[-1].submit / 3600
    load = sum(job.work for job in jobs) / 3600 / hours / cluster.total
    assert 0.85 < load <= 0.9


@pytest.mark.parametrize("count", [2, 20, 150, 1000])
def test_the_load_that_is_announced_is_true(count):
    """Where nobody waits, as many GPUs are busy until the last job comes as the words say."""
    jobs = [replace(job, milli=1000) for job in synthetic(count, seed=count).jobs]
    cluster, why = kept_busy(jobs, gpus=8, rack=16)
    roomy = SimulatedCluster(nodes=sum(-(-job.gpus // 8) for job in jobs), gpus=8, rack=16)
    found = summarise(replay(roomy, jobs, POLICIES["fifo"]))
    assert found.wait_p99 == 0
    load = found.utilisation * roomy.total / cluster.total
    assert f" {load:.0%} of the GPUs busy until the last one comes" in why
    smaller = (cluster.nodes - 1) * 8
    assert load <= 0.9
    largest = max(job.gpus for job in jobs)
    assert smaller < largest or load * cluster.total / smaller > 0.9
    assert ("the largest job asks for" in why) == (load * cluster.total / 0.9 <= smaller)


def test_jobs_that_come_all_at_once_have_a_cluster_too():
    jobs = [SimulatedJob(id=i, submit=5, duration=100, limit=100, gpus=9) for i in range(4)]
    cluster, why = kept_busy(jobs, gpus=8, rack=16)
    assert cluster.nodes == 5  # 36 GPUs busy, of 40
    assert "90% of the GPUs busy as long as the longest takes (1m 40s)" in why
    cluster, why = kept_busy(jobs[:1], gpus=4, rack=16)
    assert why.startswith("3 nodes because jobs would keep 75%")
