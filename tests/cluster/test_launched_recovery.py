"""Training under `cairn launch`: memory, ranks, a node are lost, a rank hangs, one is slow; it goes on from memory."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_job import ended, launch, nothing_left
from tiny_runs import TINY, recipe

from cairn.cli.cluster import jobs
from cairn.cluster import ettr
from cairn.cluster.spec import Checkpoint as JobCheckpoint
from cairn.cluster.spec import Elastic, Job, Restart, Role
from cairn.core.job_ledger_files import read_ledger
from cairn.core.rank_failure import failures_in
from cairn.train.checkpoint.peer_messages import HeldCopy
from cairn.train.config import Checkpoint, Data
from cairn.train.launch import run_local
from cairn.train.metrics_log import read_log
from cairn.train.parallel.layout import Layout
from cairn.train.recovery.launched_loop import LaunchedLoop
from cairn.train.recovery.node_watch import end_silent
from cairn.train.recovery.resume_agreement import Present, decide
from cairn.train.recovery.settings import Recovery
from cairn.train.recovery.status_board import TRAINING, Board
from cairn.train.run import run

WORKER = Path(__file__).with_name("launched_worker.py")
STEPS = 36


def config(folder):
    return recipe(
        folder,
        steps=STEPS,
        parallel=Layout(dp=2),
        model=TINY,
        data=Data(sources=["random"], sequence=16, sequences=4, microbatch=1),
        checkpoint=Checkpoint(every=0, export=False),
        recovery=Recovery(
            on=True, memory_every=2, checksum_every=2, silent_s=1.5, stuck_s=8, same_place=99
        ),
    )


def logged(folder):
    return [(record.step, record.loss, record.norm, record.lr) for record in read_log(folder)]


@pytest.mark.timeout(600)
def test_what_is_lost_and_who_hangs_costs_steps_and_nothing_else_and_a_slow_rank_is_named(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path / "jobs"))
    wanted = config(tmp_path / "unbroken")
    run_local(2, lambda rank, world: run(wanted, rank, log_line=lambda text: None).outcome)
    folder = tmp_path / "run"
    folder.mkdir()
    given = tmp_path / "recipe.json"
    given.write_bytes(msgspec.json.encode(config(folder), enc_hook=str))
    role = Role(
        argv=[sys.executable, str(WORKER), str(given), str(folder)],
        nodes=2,
        cpus=0.1,
        memory="64MiB",
    )
    job = Job(
        name="survives",
        roles=[role],
        time_limit="9m",
        elastic=Elastic(last_call="1s"),
        restart=Restart(policy="in_place", grace="1s", max=6),
        checkpoint=JobCheckpoint(folder=str(folder)),
    )
    record = launch(job)
    status = ended(record)
    assert (status.state, status.reason) == ("done", "all 2 nodes finished"), status
    assert logged(folder) == logged(tmp_path / "unbroken")  # to the bit, every step once
    log = (record.logs / "worker-0.log").read_text() + (record.logs / "worker-1.log").read_text()
    assert "the memory of this node was ended; another one takes its place" in log
    assert "going on from memory at step 4" in log
    assert "going on from memory at step 8" in log
    ledger = read_ledger(folder)
    told = {incident.step: incident for incident in ledger.incidents}
    stopped, hung, lost = told[5], told[7], told[9]
    assert [(one.cause, one.rung) for one in (stopped, hung, lost)] == [
        ("hang", "heal"),
        ("hang", "heal"),
        ("hardware", "spare"),
    ]
    assert (stopped.rank, hung.rank) == (1, 1)
    assert "no sign of life" in stopped.why
    assert "nothing moved for" in hung.why
    assert "its last collective was gloo:" in hung.why
    assert "rank 0 is in gloo:" in hung.why
    assert all(0 <= one.steps_lost <= 2 for one in (stopped, hung, lost))
    assert ledger.by_cause["detect"]["hang"] > 0
    assert ledger.by_cause["restart"]["hang"] > 0
    assert (ledger.state, ledger.steps) == ("ended", STEPS)
    assert sum(ledger.parts.values()) == pytest.approx(ledger.wall)
    failures = {(one.step, one.rank): one for one in failures_in(record.logs) if one.cause}
    assert failures[7, 1].cause == "hang"
    assert failures[7, 1].collective.startswith("gloo:")
    assert "in in_its_own_code" in failures[7, 1].words  # where it stood
    assert failures[5, 1].why.endswith("the process is stopped")
    supervisor = (record.folder / "supervisor.log").read_text()
    assert "): hang at step 7: nothing moved for" in supervisor
    slow = ledger.slow[0]
    assert (slow.rank, slow.host) == (1, socket.gethostname())
    assert "times the others'" in slow.why
    assert ledger.by_cause["productive"]["straggler"] > 0
    page = (folder / "report.html").read_text()
    assert "Wall time" in page
    assert "Slow ranks" in page
    # Two, and one more where the machine was too busy to move for 8 s.
    hangs = sum(one.cause == "hang" and one.rung == "heal" for one in ledger.incidents)
    assert f'incidents_total{{cause="hang",rung="heal"}} {hangs}' in ettr.scrape(folder)
    assert 'cause="straggler",part="productive"' in ettr.scrape(folder)
    assert jobs.run(["why", "survives"]) == 0
    said = capsys.readouterr().out
    assert "answered by spare" in said
    assert "slow: rank 1 on" in said
    assert nothing_left(tmp_path)
    assert not list(Path(tempfile.gettempdir()).glob(f"cairn-node-*{record.supervisor}*"))


def held(generation, world, step, ranks):
    return tuple(HeldCopy(generation, rank, step, 1, 1, world) for rank in ranks)


def present(address, copies=(), disk=0, host="h"):
    return Present(address, host, 0.0, copies, disk)


def test_the_ranks_decide_alike_and_number_their_own_node_first():
    both = held(3, 4, 10, range(4)) + held(3, 4, 15, range(2))  # of 15 the others are not there
    everybody = [present("a:1", both), present("a:1"), present("b:1"), present("b:1")]
    agreed = [decide(everybody, rank) for rank in range(4)]
    assert {(a.recall.step, a.generation, a.back_to, a.before) for a in agreed} == {(10, 3, 10, 4)}
    assert [a.addresses for a in agreed[1:3]] == [("a:1", "b:1"), ("b:1", "a:1")]
    assert [a.recall.copies[0].nodes for a in agreed[1:3]] == [(0,), (1,)]
    assert [a.keeper for a in agreed] == ["b:1", "b:1", "a:1", "a:1"]
    assert [a.leads for a in agreed] == [True, False, True, False]


def test_another_number_of_ranks_is_another_generation_and_a_newer_disk_wins():
    copies = held(3, 2, 10, range(2))
    shrunk = decide([present("a:1", copies)], 0)
    assert (shrunk.recall.step, shrunk.recall.generation, shrunk.generation) == (10, 3, 4)
    assert (shrunk.before, shrunk.keeper) == (2, "")
    newer = decide([present("a:1", copies, disk=11), present("b:1")], 0)
    assert (newer.recall, newer.back_to, newer.generation) == (None, 11, 4)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 2), st.integers(1, 3), st.integers(0, 4)),
        max_size=12,
    ),
    st.integers(1, 3),
)
def test_whatever_is_held_all_go_on_from_the_newest_step_that_is_whole(found, world):
    nodes = [chr(ord("a") + rank) for rank in range(world)]
    copies = dict.fromkeys(nodes, ())
    for node, generation, rank, step in found:
        if node in copies:
            copies[node] += (HeldCopy(generation, rank - 1, step, 1, 1, generation + 1),)
    everybody = [present(f"{node}:1", copies[node]) for node in nodes]
    agreed = [decide(everybody, rank) for rank in range(world)]
    known = {(h.generation, h.rank, h.step) for every in copies.values() for h in every}
    whole = [
        (step, generation)
        for generation in (1, 2)
        for step in range(5)
        if all((generation, rank, step) in known for rank in range(generation + 1))
    ]
    for one in agreed:
        if not whole:
            assert one.recall is None
            continue
        assert (one.recall.step, one.recall.generation) == max(whole)
        fresh = one.generation > max(generation for generation, _, _ in known)
        assert fresh or one.generation == one.recall.generation
        assert fresh == (one.recall.generation + 1 != world)


def test_nobody_waits_for_a_copy_that_a_dead_memory_was_given():
    """It was killed before it had sent the copy on: what it had not told is not waited for."""
    memory = subprocess.Popen(["true"])
    memory.wait()
    loop = LaunchedLoop.__new__(LaunchedLoop)
    loop.board, loop.rank, loop.control, loop.handed_to = Board(2, 1), 1, None, memory.pid
    loop.board.nodes["pid"][0] = memory.pid
    loop.board.set(1, copied=4, replicated=-1, settled=-1)
    loop._report_copies = lambda board: None
    loop._agree(patience_s=100_000.0)
    assert loop.board.agreed == -1
    successor = loop.board.nodes["pid"][0] = os.getpid()
    assert successor != loop.handed_to
    loop._agree(patience_s=100_000.0)
    assert loop.board.agreed == -1


def test_only_a_rank_without_a_sign_of_life_is_ended():
    """Of processes that live, stop and are gone: the stopped one is ended; a starved one has more patience."""
    import os
    import signal
    import subprocess
    import time

    board = Board(4, 1)
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    try:
        old = time.monotonic_ns() - int(3e9)
        for rank, sleeper in enumerate(sleepers):
            board.set(rank, pid=sleeper.pid, phase=TRAINING, beat_ns=old)
        os.kill(sleepers[1].pid, signal.SIGSTOP)
        sleepers[2].kill()
        while (
            Path(f"/proc/{sleepers[1].pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"
        ):
            time.sleep(0.01)
        assert end_silent(board, silent_s=2.0) == [1]
        assert sleepers[1].wait(30) == -signal.SIGKILL
        sleepers[2].wait(30)
        assert end_silent(board, silent_s=2.0) == []
        assert sleepers[0].poll() is None
        assert board.ranks["pid"].tolist() == [sleepers[0].pid, 0, 0, 0]
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
