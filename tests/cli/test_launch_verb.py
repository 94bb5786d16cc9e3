"""`cairn launch` and `cairn jobs` as a person types them: what they print, what they refuse; nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from cairn.cli.main import main
from cairn.cluster import records, supervisor_process
from cairn.cluster.job_file import read_job

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "examples" / "jobs" / "train-tiny.toml")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path / "jobs"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield tmp_path
    for record in records.latest():
        if record.supervisor:
            supervisor_process.stop(record)
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(p.info["cmdline"] or [])
    ]


def job_file(folder, code, name="quick", extra="", role=""):
    path = folder / f"{name}.toml"
    argv = json.dumps([sys.executable, "-c", code, str(folder)])
    path.write_text(
        f'name = "{name}"\n{extra}\n[[roles]]\nstart = "direct"\ncpus = 0.1\nmemory = "16MiB"\nargv = {argv}\n{role}\n'
        '[restart]\npolicy = "fail"\ngrace = "1s"\n'
    )
    return str(path)


def has_ended(pid):
    """Also where nobody has asked yet how."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition):
    ends = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


def cairn(capsys, *args):
    status = main([*args])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_a_job_runs_is_followed_and_is_remembered(folder, capfd):
    path = job_file(folder, "print('hello')", role="nodes = 2")
    status, out, _ = cairn(capfd, "launch", path)
    assert status == 0
    assert out.splitlines()[:4] == [
        "submitted 'quick' to local",
        "  cairn jobs logs quick --follow",
        "  cairn jobs why quick",
        "  cairn jobs stop quick",
    ]
    assert out.count("r0| hello") == 2
    assert out.splitlines()[-1] == "quick: done: all 2 nodes finished"
    status, out, _ = cairn(capfd, "jobs", "list")
    head, row = (line.split() for line in out.splitlines())
    assert head == ["NAME", "ENGINE", "AGE", "STATE", "REASON"]
    assert row[:2] == ["quick", "local"]
    assert "done" in row
    status, out, err = cairn(capfd, "jobs", "stop", "quick")
    assert status == 2
    assert "job 'quick' has ended already: done" in err
    status, out, _ = cairn(
        capfd, "launch", path, "--json"
    )  # the same name again, now that it has ended
    assert json.loads(out)["status"]["state"] == "done"
    assert [run.number for run in records.runs("quick")] == [1, 2]


def test_the_first_failing_rank_comes_last_and_once(folder, capfd):
    code = "import os, time; i = os.environ['CAIRN_NODE']; i == 'worker-1' and 1/0; time.sleep(60)"
    status, out, _ = cairn(capfd, "launch", job_file(folder, code, "broken", role="nodes = 2"))
    assert status == 1
    head, _, told = out.partition("broken: failed: ")
    assert "ended with exit status 1" in told.splitlines()[0]
    assert told.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "(worker-1) failed with exit status 1 (last collective: none)" in told
    assert "::cairn" not in out
    assert "r0| Traceback" in head
    status, out, _ = cairn(capfd, "jobs", "why", "broken")
    assert out.startswith("broken on local is failed: node worker-1 gave up: rank 0 on")
    status, out, _ = cairn(capfd, "jobs", "logs", "broken", "--rank", "0")
    assert out.splitlines()[-1] == "ZeroDivisionError: division by zero"
    status, out, err = cairn(capfd, "jobs", "logs", "broken", "--rank", "7")
    assert "rank 7 has written nothing yet" in err


def test_a_program_that_fails_is_started_again_unless_it_is_its_own_mistake(folder, capfd):
    again = 'import pathlib, sys; f = pathlib.Path(sys.argv[1], "n"); n = f.exists(); f.touch(); sys.exit(9 * (not n))'
    path = job_file(folder, again, "again")
    Path(path).write_text(Path(path).read_text().replace('"fail"', '"in_place"'))
    assert cairn(capfd, "launch", path)[1].endswith("again: done: all 1 nodes finished\n")
    assert records.read_status(records.find("again")).restarts == 1
    path = job_file(folder, "import no_such_module", "wrong")
    Path(path).write_text(Path(path).read_text().replace('"fail"', '"in_place"'))
    status, out, _ = cairn(capfd, "launch", path)
    assert status == 1
    assert "wrong: failed: not tried again: rank 0 on" in out
    assert out.count("r0| Traceback") == 1


def test_two_jobs_with_one_name_and_a_stop_that_leaves_nothing(folder, capfd):
    path = job_file(folder, "import time; time.sleep(1000)", "long", role="nodes = 3")
    assert cairn(capfd, "launch", path, "--detach")[0] == 0
    status, _, err = cairn(capfd, "launch", path, "--detach")
    assert status == 2
    assert "a job 'long' is" in err
    assert "hint: cairn jobs stop long" in err
    status, out, _ = cairn(capfd, "jobs", "stop", "long", "--json")
    assert json.loads(out)["state"] == "stopped"
    assert cairn(capfd, "jobs", "why", "long")[1].startswith("long on local is stopped: stopped ")


def test_a_job_waits_for_another_and_a_time_limit_ends_it(folder, capfd):
    first = job_file(folder, "import time; time.sleep(1000)", "first", extra='time_limit = "2s"')
    second = job_file(folder, "print('never')", "second", extra='after = ["first"]')
    third = job_file(folder, "", "third", extra='after = ["nobody"]')
    assert cairn(capfd, "launch", first, "--detach")[0] == 0
    status, out, _ = cairn(capfd, "launch", second)
    assert status == 1
    assert "second: failed: job 'first', which has to be done before, is failed" in out
    assert "never" not in out
    assert "time limit of 2s reached" in cairn(capfd, "jobs", "why", "first")[1]
    status, _, err = cairn(capfd, "launch", third)
    assert (status, "no job 'nobody'" in err) == (2, True)


def test_a_checkpoint_folder_of_another_run_is_refused(folder, capfd):
    kept = folder / "kept"
    extra = f'[checkpoint]\nfolder = "{kept}"\n'
    mine, other = (job_file(folder, "", name) for name in ("mine", "other"))
    for path in (mine, other):
        Path(path).write_text(Path(path).read_text() + extra)
    assert cairn(capfd, "launch", mine)[0] == 0
    status, _, err = cairn(capfd, "launch", other)
    assert status == 2
    assert f"checkpoint.folder {kept} holds the run of job 'mine', not of 'other'" in err
    assert not records.runs("other")
    assert cairn(capfd, "launch", mine)[0] == 0  # its own
    assert cairn(capfd, "launch", other, "--adopt")[0] == 0
    (kept / ".cairn-job").unlink()
    (kept / "weights").touch()
    assert "files that no job of Cairn wrote" in cairn(capfd, "launch", mine)[2]


# In a session of its own, as a daemon is: no signal of a terminal, a group or a parent reaches it.
FORGETFUL = """
import os, subprocess, sys, time
forgotten = [sys.executable, "-c", "import time; time.sleep(1000)", sys.argv[1]]
pid = subprocess.Popen(forgotten, start_new_session=True, stdout=-3, stderr=-3).pid
os.symlink(str(pid), sys.argv[1] + "/forgotten")
"""


def test_what_a_program_leaves_behind_is_ended_with_its_node(folder, capfd):
    status, out, _ = cairn(capfd, "launch", job_file(folder, FORGETFUL, "forgetful"))
    assert (status, out.splitlines()[-1]) == (0, "forgetful: done: all 1 nodes finished")
    assert has_ended(int(os.readlink(folder / "forgotten")))


def test_ctrl_c_leaves_the_job_running(folder):
    path = job_file(folder, "import time; print('up', flush=True); time.sleep(1000)", "kept")
    process = subprocess.Popen(
        [sys.executable, "-m", "cairn", "launch", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "r0| up\n":
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "job 'kept' goes on; stop it: cairn jobs stop kept" in err
    record = records.find("kept")
    assert records.read_status(record).state == "running"


@pytest.mark.parametrize("engine", ["local", "ray", "slurm", "kubernetes"])
def test_a_dry_run_submits_nothing(folder, capfd, engine):
    status, out, _ = cairn(capfd, "launch", TINY, "--on", engine, "--dry-run")
    assert status == 0
    assert "torch.distributed.run" in out
    status, out, _ = cairn(capfd, "launch", TINY, "--on", engine, "--dry-run", "--json")
    assert (status, "torch.distributed.run" in out) == (0, True)
    assert json.loads(out)["engine"] == engine
    assert not list(records.latest())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('queue = "gold"', "names the queue 'gold', and local has no queues"),
        ('prority = "x"', "unknown field 'prority'"),
        ("[array]\ncount = 4", "local has no job arrays"),
        ("deadline = 2020-01-01T00:00:00Z", "the deadline of job 'quick', 2020-01-01T00:00:00+00:00, has passed"),
        ('[checkpoint]\nfolder = "/proc/none/of/ours"', "/proc/none/of/ours cannot be used: no such file"),
    ],
)  # fmt: skip
def test_what_cannot_run_leaves_no_record(folder, capfd, extra, message):
    status, _, err = cairn(capfd, "launch", job_file(folder, "", extra=extra))
    assert status == 2
    assert message in err
    assert not list(records.latest())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target", "volcano"], "--target volcano is a kind of object on kubernetes"),
        (["--on", "slurm", "--address", "head:1"], "and the job goes to slurm"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(folder, capfd, flags, message):
    status, _, err = cairn(capfd, "launch", job_file(folder, ""), *flags)
    assert (status, message in err) == (2, True)
    assert not list(records.latest())


def test_a_folder_for_records_that_cannot_be_made(folder, capfd, monkeypatch):
    monkeypatch.setenv("CAIRN_JOBS", "/proc/none/of/ours")
    status, _, err = cairn(capfd, "launch", job_file(folder, ""))
    assert (status, "records of jobs cannot be kept in /proc/none/of/ours" in err) == (2, True)
    assert "hint: CAIRN_JOBS=" in err


def test_an_earlier_job_on_an_engine_that_is_gone_keeps_its_name(folder, capfd, monkeypatch):
    path = job_file(folder, "")
    assert cairn(capfd, "launch", path)[0] == 0
    earlier = records.find("quick")
    records.save(msgspec.structs.replace(earlier, engine="slurm", id="7", supervisor=0))
    monkeypatch.setenv("PATH", str(folder))
    status, _, err = cairn(capfd, "launch", path)
    assert status == 2
    assert "whether the earlier job 'quick' on slurm has ended is not known: Slurm is not" in err
    assert "hint: give this one another name" in err
    assert "launch from a login node" in err  # what that engine needs


def test_what_an_engine_refused_is_no_job_of_its(folder, capfd):
    """Without a number Slurm would tell of everybody's jobs; an object of the name may be somebody else's."""
    from cairn.cluster.backends.catalogue import backend_of

    for engine in ("slurm", "kubernetes"):
        record = records.create(read_job(Path(job_file(folder, "", engine))), engine)
        refused = records.JobStatus(state="failed", reason="not submitted: no")
        records.write_status(record, refused)
        assert backend_of(record).status(record) == refused
        status, _, err = cairn(capfd, "jobs", "stop", engine)
        assert (status, f"job '{engine}' has ended already: failed: not submitted" in err) == (
            2,
            True,
        )


def test_too_many_gpus_and_an_engine_that_is_not_there(folder, capfd, monkeypatch):
    path = job_file(folder, "", role="gpus = 4096")
    status, _, err = cairn(capfd, "launch", path)
    assert status == 2
    assert "needs 1 nodes of 4096 GPUs" in err
    monkeypatch.setenv("PATH", str(folder))
    assert "Slurm is not installed here" in cairn(capfd, "launch", path, "--on", "slurm")[2]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "'ray' is not installed" in cairn(capfd, "launch", path, "--on", "ray")[2]
    assert "kubectl is not installed here" in cairn(capfd, "launch", path, "--on", "kubernetes")[2]
    assert not list(records.latest())


def test_names_that_are_not_there(folder, capfd):
    for verb in ("logs", "why", "stop"):
        status, _, err = cairn(capfd, "jobs", verb, "nothing")
        assert status == 2
        assert "no job 'nothing'" in err
    assert cairn(capfd, "jobs", "list")[1].startswith("no jobs; launch one: cairn launch examples/")
    assert cairn(capfd, "launch", str(folder / "none.toml"))[0] == 2


def test_a_damaged_record_is_no_job_and_no_crash(folder, capfd):
    assert cairn(capfd, "launch", job_file(folder, ""))[0] == 0
    record = records.find("quick")
    (record.folder / "status.json").write_text("{")
    assert "its record was never finished" in cairn(capfd, "jobs", "why", "quick")[1]
    (record.folder / "record.json").write_text("")
    assert "no job 'quick'" in cairn(capfd, "jobs", "why", "quick")[2]


def test_a_killed_supervisor_is_a_lost_job(folder, capfd):
    """Nobody is left to end what the program has started, but one that waited for that."""
    path = job_file(folder, FORGETFUL + "time.sleep(1000)", "killed")
    cairn(capfd, "launch", path, "--detach")
    record, daemon = records.find("killed"), folder / "forgotten"
    wait_until(lambda: daemon.is_symlink() and records.read_status(record).state == "running")
    os.kill(record.supervisor, signal.SIGKILL)
    os.waitpid(record.supervisor, 0)
    assert "is lost: its supervisor" in cairn(capfd, "jobs", "why", "killed")[1]
    wait_until(lambda: has_ended(int(os.readlink(daemon))))
    daemon.unlink()
    assert cairn(capfd, "launch", path, "--detach")[0] == 0  # the name is free again
