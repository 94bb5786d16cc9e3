"""Plans are read strictly and drawn by seed; a real job is broken, and the report says what it cost."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.cli.main import main
from cairn.cluster import chaos_faults
from cairn.cluster.chaos import ChaosReport, FaultOutcome, complaints_of
from cairn.cluster.chaos_faults import NotPermitted, corrupt_newest, slow_down
from cairn.cluster.chaos_network import ChaosNetwork
from cairn.cluster.chaos_plan import ChaosPlan, Fault, read_plan, schedule, victim
from cairn.core.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples" / "chaos"
PLANS = sorted(path for path in EXAMPLES.glob("*.toml") if path.name != "tiny.toml")


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_examples_can_be_read(path):
    plan = read_plan(path)
    assert plan.name == path.stem
    assert Path(plan.argv[2]).is_file()
    assert schedule(plan)


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ('faults = []\nargv = ["x"]', "missing required field `name`", ""),
        ('name = "a"\nargv = ["x"]\nfaults = []', "needs argv and faults", ""),
        (
            'name = "a"\nargv = ["x"]\n[[faults]]\nkind = "kil"\nat_step = 3',
            "kil",
            "did you mean 'kill'",
        ),
        (
            'name = "a"\nargv = ["x"]\n[[faults]]\nkind = "kill"\nat_stp = 3',
            "at_stp",
            "did you mean 'at_step'",
        ),
        ('name = "a"\nargv = ["x"]\n[[faults]]\nkind = "kill"', "give at_step or between", ""),
        ('name = "a"\nargv = ["x"]\n[[faults]]\nkind = "kill"\nbetween = [9, 3]', "is empty", ""),
        (
            'name = "a"\nargv = ["x"]\n[[faults]]\nkind = "kill"\nat_step = 1\ntarget = "rnak 1"',
            "rnak 1",
            "rank N",
        ),
        (
            'name = "a"\nargv = ["x"]\n[[faults]]\nkind = "kill"\nat_step = 0',
            "at_step is 0",
            "count from 1",
        ),
        ('name = "a"\nargv = ["x"]\nfaults = 3', "expected `array`", "[[faults]]"),
        (
            'name = "a"\nargv = ["x"]\n[[faults]]\nkind = "fill-disk"\nat_step = 1\nlimit = "abc"',
            "abc",
            "",
        ),
        (
            'name = "a"\nargv = ["x"]\n[[faults]]\nkind = "partition"\nat_step = 1',
            "cuts off a node",
            "node 1",
        ),
        (
            'name = "a"\nargv = ["x"]\n[[faults]]\nkind = "flip-bit"\nat_step = 1\ntarget = "node 1"',
            "weights",
            "rank",
        ),
        ("name = ", "line 1", ""),
    ],
)
def test_a_plan_that_is_wrong_is_refused_with_the_place(tmp_path, text, what, hint):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_plan(path)
    assert what in error.value.message
    assert hint in (error.value.hint or "")


@given(st.floats(0.05, 0.9), st.lists(st.floats(0, 0.3), min_size=1, max_size=9))
def test_a_slow_process_runs_its_share_however_late_the_signals_come(duty, late):
    """The clock and the signals are the test's own: a pause takes longer than was asked for."""
    now, since, spent = [0.0], [0.0], {signal.SIGCONT: 0.0, signal.SIGSTOP: 0.0}
    state, delays = [signal.SIGCONT], itertools.cycle(late)

    def pause(seconds):
        now[0] += seconds + (next(delays) if state[0] == signal.SIGCONT else 0.0)

    def sent(pids, number, word):
        spent[state[0]] += now[0] - since[0]
        state[0], since[0] = number, now[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chaos_faults, "_signal", sent)
        clock = SimpleNamespace(sleep=pause, monotonic=lambda: now[0])
        patch.setattr(chaos_faults, "time", clock)
        slow_down([1], Fault(kind="slow", at_step=1, seconds=1000.0, duty=duty))
    assert state == [signal.SIGCONT]
    assert now[0] <= 1000.0 + chaos_faults.PERIOD_S * duty + max(late) + 1e-6
    ran, still = spent[signal.SIGCONT], spent[signal.SIGSTOP]
    assert ran / (ran + still) == pytest.approx(duty, rel=0.1)


@given(st.integers(0, 1000), st.integers(1, 20), st.integers(1, 30), st.integers(0, 30))
def test_the_same_seed_breaks_the_same_things(seed, times, low, width):
    fault = Fault(kind="kill", between=(low, low + width), times=times)
    plan = ChaosPlan(name="x", argv=["x"], faults=[fault], seed=seed)
    due = schedule(plan)
    assert due == schedule(plan)
    assert len(due) == times
    assert [one.step for one in due] == sorted(one.step for one in due)
    assert all(low <= one.step <= low + width for one in due)


def test_victims():
    import random

    chance = random.Random(0)
    assert victim("node 1", chance, 4, 2) == ("node", 1)
    assert {victim("any rank", chance, 4, 2) for _ in range(50)} == {("rank", n) for n in range(4)}
    assert {victim("any process", chance, 2, 2)[0] for _ in range(50)} == {
        "rank",
        "memory",
    }
    with pytest.raises(ConfigError, match="there are 4"):
        victim("rank 4", chance, 4, 2)


def test_every_broken_promise_is_a_complaint():
    plan = ChaosPlan(
        name="x", argv=["x"], faults=[], most_steps_lost=5, most_detect_s=2, most_recovery_s=15
    )
    fine = FaultOutcome(
        kind="kill", target="rank 1", step=7, found_s=0.1, recovered_s=2, steps_lost=2
    )
    report = ChaosReport(
        plan="x",
        fine=True,
        complaints=[],
        faults=[fine],
        steps=10,
        steps_lost=2,
        same_losses=True,
        worst_difference=0.0,
        ledger=None,
        orphans=[],
        exit_status=0,
        seconds=1,
        unbroken_seconds=1,
        folder="",
    )
    assert complaints_of(report, plan) == []
    bad = [
        msgspec.structs.replace(fine, steps_lost=6, found_s=3, recovered_s=16),
        msgspec.structs.replace(fine, found_s=None, recovered_s=None, steps_lost=None),
    ]
    broken = msgspec.structs.replace(
        report, faults=bad, same_losses=False, worst_difference=0.5, orphans=[7], exit_status=1
    )
    found = complaints_of(broken, plan)
    assert len(found) == 7
    assert any("never found" in word for word in found)


def test_nothing_to_corrupt_is_said(tmp_path):
    import random

    with pytest.raises(NotPermitted, match="no complete checkpoint"):
        corrupt_newest(tmp_path, random.Random(0))


def test_a_network_that_cannot_be_built_is_a_reason_and_nothing_is_left(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with ChaosNetwork(True) as network:
        assert network.environment() == {}
        with pytest.raises(NotPermitted, match="not installed"):
            network.inject(Fault(kind="partition", target="node 1", at_step=1), ("node", 1))


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_namespaces_are_taken_down_again():
    with ChaosNetwork(True, nodes=2) as network:
        if network.obstacle:
            pytest.skip(network.obstacle)
        names = network.environment()["CAIRN_NODE_NAMESPACES"].split(",")
        assert all(Path(f"/run/netns/{name}").exists() for name in names)
        cut = network.inject(Fault(kind="partition", at_step=1, seconds=0.01), ("node", 1))
        assert "node 1 is cut off" in cut
    assert not any(Path(f"/run/netns/{name}").exists() for name in names)
    assert not Path(f"/sys/class/net/{network.tag}").exists()


def test_the_command_line_kills_a_rank_and_reports(tmp_path):
    """As a user runs it, in a process of its own; what the losses are beside an unbroken run is tested elsewhere."""
    plan = tmp_path / "plan.toml"
    argv = [
        "cairn",
        "train",
        str(EXAMPLES / "tiny.toml"),
        "--steps",
        "14",
        "--checkpoint.every",
        "0",
    ]
    plan.write_text(
        f'name = "x"\nargv = {json.dumps(argv)}\ncompare = false\nmost_steps_lost = 5\n'
        '[[faults]]\nkind = "kill"\ntarget = "any rank"\nat_step = 6\n'
        '[[faults]]\nkind = "partition"\ntarget = "node 1"\nat_step = 7\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "cairn", "chaos", str(plan), "--json", "--out", str(tmp_path / "x")],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"PATH": "/nowhere"},
    )
    report = json.loads(done.stdout)
    assert report["complaints"] == [], report["complaints"]
    assert done.returncode == 0
    killed, cut = report["faults"]
    assert (killed["cause"], killed["rung"]) == ("killed", "heal")
    assert 0 <= killed["steps_lost"] <= 5
    assert "not installed" in cut["skipped"]
    assert report["same_losses"] is None
    assert report["orphans"] == []
    assert report["ledger"]["steps"] == report["steps"] == 14


def chaos(capsys, tmp_path, argv, *more, extra=""):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f'name = "x"\nargv = {json.dumps(argv)}\n{extra}\n[[faults]]\nkind = "kill"\nat_step = 3\n'
    )
    status = main(["chaos", str(plan), *more])
    return status, capsys.readouterr()


def test_a_plan_that_breaks_nothing_is_not_kept(capsys, tmp_path):
    status, shown = chaos(capsys, tmp_path, ["true"], extra="compare = false")
    assert status == 1
    assert "BROKEN: nothing was broken: the job was over before" in shown.out
    assert "--recovery.on" in shown.out
    assert "1 of 1 faults skipped" in shown.out


def test_a_job_that_cannot_start_or_fails_by_itself_is_told(capsys, tmp_path):
    status, shown = chaos(capsys, tmp_path, ["no-such-program"])
    assert (status, "starts no-such-program: no such file" in shown.err) == (2, True)
    failing = [sys.executable, "-c", "print('a word of its own'); raise SystemExit(3)"]
    status, shown = chaos(capsys, tmp_path, failing)
    assert (status, "exit status 3" in shown.err, "a word of its own" in shown.err) == (
        2,
        True,
        True,
    )
    status, shown = chaos(capsys, tmp_path, failing, extra="compare = false")
    assert (status, "a word of its own" in shown.out) == (1, True)
    assert chaos(capsys, tmp_path, ["true"], "--times", "-1")[0] == 2


def test_a_folder_with_an_earlier_run_and_a_missing_plan_are_refused(tmp_path):
    (tmp_path / "broken").mkdir()
    command = [sys.executable, "-m", "cairn", "chaos"]
    one = subprocess.run(
        [*command, str(PLANS[0]), "--out", str(tmp_path)], capture_output=True, text=True
    )
    assert (one.returncode, "holds an earlier run" in one.stderr) == (2, True)
    other = subprocess.run([*command, "nowhere.toml"], capture_output=True, text=True)
    assert (other.returncode, "no such file: nowhere.toml" in other.stderr) == (2, True)
