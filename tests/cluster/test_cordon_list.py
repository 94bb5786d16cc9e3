"""Nodes that failed are left out by the next job: learned from logs, once each; lifted by a person; never all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.cli.cluster import jobs
from cairn.cluster import cordon_list, health, rank, records
from cairn.cluster.backends.ray_placement import _elsewhere
from cairn.cluster.backends.slurm_script import script
from cairn.cluster.cordon_list import avoid, learned, planned
from cairn.cluster.inventory import ClusterInventory, ClusterNode
from cairn.cluster.resolve import resolve
from cairn.cluster.spec import Health, Job, Role
from cairn.core.cordon import DAY_S, Cordons
from cairn.core.errors import UsageError
from cairn.core.rank_failure import RankFailure, found_in, mark

JOB = Job(name="job", roles=[Role(argv=["x"], nodes=2)])
BROKEN = "Xid 79: GPU has fallen off the bus"


def failure(host="n1", at=1000.0, **about):
    given = dict(
        rank=0, host="h", machine=host, at=at, status=-9, cause="hang", why="nothing moved"
    )
    return RankFailure(**(given | about))


def cluster(*names, engine="slurm"):
    return ClusterInventory(
        engine=engine, nodes=[ClusterNode(name=name, cpus=8.0) for name in names]
    )


def test_hardware_at_once_three_hangs_within_a_day_and_each_end_once():
    broken = failure(cause=None, status=1, words=BROKEN)
    once = learned(Cordons(), [broken], 2000.0)
    assert "fallen off the bus" in once.excluded(2000.0)["n1"]
    assert learned(once, [broken], 2000.0) == once
    hangs = [failure(at=1000.0 + hour) for hour in range(3)]
    assert learned(Cordons(), hangs[:2], 2000.0).excluded(2000.0) == {}
    assert "n1" in learned(Cordons(), hangs, 2000.0).excluded(2000.0)
    assert learned(Cordons(), hangs, 1002.0 + DAY_S).excluded(1002.0 + DAY_S) == {}
    assert learned(Cordons(), [failure(cause="user", at=t) for t in (1, 2, 3)], 9.0) == Cordons()
    lost = failure(cause=None, status=1, words="RuntimeError: Connection reset by peer")
    assert learned(Cordons(), [lost] * 5, 2000.0) == Cordons()  # a bystander


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20)), max_size=12), st.data())
def test_however_often_and_in_whatever_parts_the_logs_are_read_the_list_is_the_same(ends, data):
    failures = [failure(host, float(at)) for host, at in sorted(set(ends), key=lambda end: end[1])]
    whole = learned(Cordons(), failures, 30.0)
    cut = data.draw(st.integers(0, len(failures)))
    parts = learned(learned(Cordons(), failures[:cut], 30.0), failures, 30.0)
    assert parts == whole == learned(whole, failures, 30.0)
    forgiven = whole.lift("a", 25.0)
    assert learned(forgiven, failures, 30.0) == forgiven
    assert "a" not in forgiven.excluded(30.0)


def test_a_job_goes_to_the_other_nodes_and_the_last_one_is_used_all_the_same():
    cordons = Cordons().cordon("n1", 5.0, "disk")
    left, bad, notes = avoid(cluster("n1", "n2", "n3"), cordons, 6.0)
    assert ([node.name for node in left.nodes], bad) == (["n2", "n3"], ["n1"])
    assert notes == ["node n1 is left out: disk (cairn jobs nodes)"]
    plan = planned(resolve(JOB, left), bad, notes)
    assert "#SBATCH --exclude=n1\n" in script(plan, "/logs", [])
    assert "--exclude" not in script(resolve(JOB, left), "/logs", [])
    nodes = [{"NodeID": "n1"}, {"NodeID": "n2"}]
    assert _elsewhere(plan, nodes) == {"bundle_label_selector": [{"ray.io/node-id": "!in(n1)"}] * 2}
    assert _elsewhere(resolve(JOB, left), nodes) == {}
    everything, bad, notes = avoid(cluster("n1"), cordons, 6.0)
    assert (len(everything.nodes), bad) == (1, [])
    assert "used all the same" in notes[0]
    assert avoid(cluster("n1", "n2", engine="local"), cordons, 6.0)[1] == []


def test_the_verb_shows_adds_lifts_and_learns_from_the_logs_of_jobs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path))
    assert jobs.run(["nodes"]) == 0
    assert "no node is left out" in capsys.readouterr().out
    record = records.create(JOB, "slurm")
    now = record.created
    (record.logs / "worker-0.log").write_text(
        mark(failure("n7", now, cause="hardware", why="ECC")) + "\n"
    )
    assert jobs.run(["nodes", "--cordon", "n8", "--why", "fan"]) == 0
    said = capsys.readouterr().out
    assert "n7  left out: ECC" in said
    assert "n8  left out: fan" in said
    assert jobs.run(["nodes", "--lift", "n7", "--json"]) == 0
    assert [one["node"] for one in json.loads(capsys.readouterr().out)["cordons"]] == ["n8"]
    assert set(cordon_list.current().excluded(now)) == {"n8"}  # what was before is forgiven
    with pytest.raises(UsageError, match="n9") as error:
        jobs.run(["nodes", "--lift", "n9"])
    assert error.value.hint


def test_a_node_that_is_not_fit_is_named_by_its_first_rank_and_refused_if_the_job_says_so(
    tmp_path, monkeypatch, capfd
):
    judge = health.judge
    unfit = health.HealthLimits(
        free_disk_bytes=1 << 62, free_memory=0.0, free_shared_bytes=0, write_s=1e9
    )
    monkeypatch.setattr(health, "judge", lambda vitals, limits: judge(vitals, unfit))
    monkeypatch.setattr(rank, "run", lambda program, values: 0)
    monkeypatch.delenv("CAIRN_JOB_HEALTH", raising=False)
    assert rank.main(["--", "x"]) == 0
    assert "warning: this node is not fit for work: disk:" in capfd.readouterr().out
    monkeypatch.setenv("CAIRN_JOB_HEALTH", "refuse")
    assert rank.main(["--", "x"]) == rank.UNFIT
    (told,) = found_in(capfd.readouterr().out.splitlines())
    assert (told.verdict.cause, told.status) == ("hardware", rank.UNFIT)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank.main(["--", "x"]) == 0
    assert capfd.readouterr().out == ""
    assert Health(check="refuse").check == "refuse"
