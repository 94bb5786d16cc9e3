"""`cairn simulate`: what it prints, what it writes, and what it refuses."""

import json

import pytest

from cairn.cli.main import main
from cairn.cluster.simulate.explain import explain
from cairn.cluster.simulate.jobs import SimulatedCluster, SimulatedJob
from cairn.cluster.simulate.policies import POLICIES
from cairn.cluster.simulate.replay import replay


def run(capsys, *args):
    status = main(["simulate", *args])
    return status, *capsys.readouterr()


def test_policies_are_compared(capsys, tmp_path):
    page = tmp_path / "out.html"
    status, out, _ = run(
        capsys,
        "cluster",
        "--synthetic",
        "300",
        "--policy",
        "fifo,easy,fgd",
        "--html",
        str(page),
        "--json",
    )
    assert status == 0
    document = json.loads(out)
    assert [row["policy"] for row in document["policies"]] == ["fifo", "easy", "fgd"]
    fifo, easy, _ = document["policies"]
    assert fifo["done"] == easy["done"] == 300
    assert easy["wait_mean"] <= fifo["wait_mean"]
    text = page.read_text()
    assert "<svg" in text
    assert "http" not in text.replace("http-equiv", "")


def test_every_policy_prints_a_row(capsys):
    status, out, _ = run(capsys, "cluster", "--synthetic", "60", "--policy", "all")
    assert status == 0
    words = [line.split() for line in out.splitlines() if line]
    assert [row[0] for row in words if row[0] in POLICIES and row[1] != "rejects"] == list(POLICIES)


def test_openb_is_packed(capsys, tmp_path):
    pods, nodes, page = tmp_path / "pods.csv", tmp_path / "nodes.csv", tmp_path / "out.html"
    header = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time,deletion_time\n"
    pods.write_text(
        header + "".join(f"p{i},1000,10,1,{500 + 500 * (i % 2)},0,9\n" for i in range(8))
    )
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\na,64000,1000,4,T4\nb,64000,1000,4,T4\n")
    status, out, _ = run(
        capsys,
        "cluster",
        "--trace",
        str(pods),
        "--node-list",
        str(nodes),
        "--seeds",
        "2",
        "--json",
        "--html",
        str(page),
    )
    assert status == 0
    rows = json.loads(out)["policies"]
    assert [row["policy"] for row in rows] == [
        "random",
        "dotprod",
        "clustering",
        "packing",
        "bestfit",
        "fgd",
    ]
    assert all(50 < row["allocated_percent"] <= 100 for row in rows)
    assert "<svg" in page.read_text()


def test_failures(capsys, tmp_path):
    page = tmp_path / "out.html"
    status, out, _ = run(capsys, "failures", "--gpus", "100000", "--html", str(page), "--json")
    assert status == 0
    document = json.loads(out)
    by_name = {row["scheme"]: row for row in document["schemes"]}
    assert by_name["sync"]["ettr"] == pytest.approx(0.398, abs=0.001)
    for row in by_name.values():
        assert row["monte_carlo"]["ettr"] == pytest.approx(row["ettr"], rel=0.01)
    assert [row["gpus"] for row in document["sweep"]["sync"]][-1] == 131_072
    assert "<svg" in page.read_text()


@pytest.mark.parametrize("place", ["", ".", "/dev/null/page.html"])
def test_a_page_of_failures_that_cannot_be_written_is_refused_first(capsys, place):
    status, out, err = run(capsys, "failures", f"--html={place}")
    assert (status, out) == (2, "")
    assert "error: cannot write" in err


def test_failures_in_words(capsys):
    status, out, _ = run(
        capsys, "failures", "--gpus", "16384", "--detect", "600", "--scheme", "async"
    )
    assert status == 0
    assert "1h 48m" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["cluster"], "--trace FILE or --synthetic"),
        (["cluster", "--synthetic", "0"], "--synthetic is 0"),
        (["cluster", "--synthetic", "9", "--policy", "esay"], "did you mean 'easy'"),
        (["cluster", "--synthetic", "9", "--policy", ","], "--policy is empty"),
        (["cluster", "--synthetic", "9", "--nodes", "0"], "--nodes is 0"),
        (["cluster", "--synthetic", "9", "--overestimate", "0.5"], "ended early"),
        (["cluster", "--synthetic", "9", "--why", "99"], "no job 99"),
        (["cluster", "--trace", "/no/such.csv"], "cannot read"),
        (["cluster", "--synthetic", "9", "--seed", "-1"], "--seed is -1"),
        (["cluster", "--synthetic", "9", "--cpus", "-1"], "--cpus is -1"),
        (["cluster", "--synthetic", "9", "--html", "/no/such/out.html"], "cannot write a page to"),
        (["cluster", "--synthetic", "9", "--html", "/"], "cannot write a page to"),
        (["cluster", "--synthetic", "9", "--nodes", "1000001"], "--nodes is 1000001"),
        (["failures", "--gpus", "0"], "--gpus is 0"),
        (["failures", "--rate", "rsc"], "no failure rate"),
        (["failures", "--rate", "-1"], "--rate is -1"),
        (["failures", "--scheme", "asink"], "did you mean 'async'"),
        (["failures", "--write", "-2"], "write is -2"),
        (["failurs"], "did you mean 'failures'"),
    ],
)
def test_mistakes_are_answered(capsys, args, says):
    status, _, err = run(capsys, *args)
    assert status == 2
    assert says in err
    assert "Traceback" not in err


def test_why_a_job_waits(capsys):
    """One line each, with the numbers that decide it."""
    seen = {}
    jobs = [
        SimulatedJob(id=0, submit=0, duration=100, limit=100, gpus=5),
        SimulatedJob(id=1, submit=0, duration=100, limit=200, gpus=5),
        SimulatedJob(id=2, submit=0, duration=10, limit=10, gpus=16),
        SimulatedJob(id=3, submit=0, duration=500, limit=500, gpus=2),
        SimulatedJob(id=4, submit=0, duration=10, limit=10, gpus=4),
    ]
    easy = POLICIES["easy"]

    def decide(view):
        action = easy.decide(view)
        if action is None and view.now == 0:
            seen.update({job.id: explain(view, job, "easy") for job in view.waiting})
        return action

    from msgspec.structs import replace

    replay(SimulatedCluster(nodes=2), jobs, replace(easy, decide=decide))
    assert seen[2].startswith(
        "needs 16 GPUs, 6 of 16 are idle; it is the next, in 3m 20s at the latest"
    )
    assert "would delay job 2" in seen[3]
    assert "in 3m 20s" in seen[3]
    assert seen[4].startswith(
        "needs 4 GPUs on one node, 6 are idle but at most 3 on one (fragmentation)"
    )


def test_the_watched_job_tells_its_story(capsys, tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("submit,duration,gpus\n0,100,8\n1,50,8\n2,10,1\n")
    status, out, _ = run(
        capsys,
        "cluster",
        "--trace",
        str(file),
        "--nodes",
        "1",
        "--policy",
        "fifo",
        "--why",
        "2",
        "--json",
    )
    assert status == 0
    reasons = [why for _, why in json.loads(out)["why"]["fifo"]]
    assert reasons == [
        "needs 1 GPU, 0 of 8 are idle; 1 job ahead of it",
        "needs 1 GPU, 0 of 8 are idle; it is the next, in 50 s at the latest",
    ]
    assert json.loads(out)["fate"]["fifo"] == "job 2 waits 2m 28s, done 2m 38s after it came"


def test_whoever_is_rejected_is_told_why(capsys, tmp_path):
    """A job larger than the cluster does not hold up the others, and is not lost in a number."""
    file, page = tmp_path / "trace.csv", tmp_path / "out.html"
    file.write_text("submit,duration,gpus\n0,100,8\n1,50,400\n2,10,1\n")
    args = ["cluster", "--trace", str(file), "--nodes", "2", "--policy", "FIFO,easy"]
    status, out, _ = run(capsys, *args, "--why", "1", "--html", str(page))
    assert status == 0
    for name in ("fifo", "easy"):
        assert f"{name} rejects job 1: asks for 400 GPUs, the cluster has 16" in out
        assert f"{name}: job 1 is rejected: asks for 400 GPUs, the cluster has 16" in out
    assert "asks for 400 GPUs" in page.read_text()
    status, out, _ = run(capsys, *args, "--json")
    document = json.loads(out)
    assert document["rejected"]["easy"] == [[1, "asks for 400 GPUs, the cluster has 16"]]
    assert [row["done"] for row in document["policies"]] == [2, 2]
    assert "why" not in document


def test_drf_counts_cpus_where_the_cluster_has_some(capsys, tmp_path):
    """Half of the CPUs weigh more than an eighth of the GPUs; whoever asks for more than there are is told."""
    file = tmp_path / "trace.csv"
    file.write_text(
        "submit,duration,gpus,cpus,user\n0,100,1,16,ann\n0,100,2,2,bob\n1,100,1,16,ann\n1,100,5,2,bob\n2,9,1,64,eve\n"
    )
    args = ["cluster", "--trace", str(file), "--nodes", "1", "--policy", "drf", "--json"]
    for cpus, first in (("0", "2"), ("32", "3")):  # ann holds fewer GPUs; with CPUs bob holds less
        status, out, _ = run(capsys, *args, "--why", first, "--cpus", cpus)
        assert status == 0
        document = json.loads(out)
        assert "starts as it comes" in document["fate"]["drf"]
        assert len(document["rejected"]["drf"]) == (cpus == "32")
    assert document["rejected"]["drf"] == [[4, "asks for 64 CPUs, the cluster has 32"]]


def test_a_job_that_never_waits_has_a_fate(capsys):
    status, out, _ = run(capsys, "cluster", "--synthetic", "3", "--policy", "sjf", "--why", "0")
    assert status == 0
    assert "sjf: job 0 starts as it comes, done " in out
