"""Real processes are killed, stopped and corrupted; the run goes on, and its losses are those of an unbroken one."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import urllib.error
import urllib.request
from itertools import product
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist
from local_runs import (
    MODEL,
    config,
    die,
    flip_bit,
    kill_node,
    left_behind,
    logged,
    once,
    recovered,
    unbroken,
    wait_for_copies,
)
from tiny_runs import recipe

from cairn.core.errors import ConfigError
from cairn.core.job_ledger_files import METRICS, read_ledger
from cairn.train.bad_step import Verdict
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.peer_restore import ask_holdings, keep_at
from cairn.train.config import BadStep
from cairn.train.launch import RankFailed
from cairn.train.parallel.layout import Layout
from cairn.train.recovery import guarded_loop, launched, local_driver
from cairn.train.recovery.journal import read_status
from cairn.train.recovery.metrics_page import serve_metrics
from cairn.train.run import run

KILLS = int(os.environ.get("CAIRN_TEST_KILLS", "3"))  # 50 in the nightly form


@pytest.mark.timeout(120 + 20 * KILLS)
def test_any_process_may_be_killed_and_the_losses_are_the_unbroken_ones(tmp_path):
    """Ranks and memories: drawn by chance, one after another in one run; equal to the bit."""
    steps = 6 * KILLS
    unbroken(config(tmp_path / "a", steps=steps))
    folder = tmp_path / "b"
    chance = random.Random(90)
    victims = [*range(4), *range(4), "memory 0", "memory 1"]
    plan = {6 * n + chance.randint(1, 3): chance.choice(victims) for n in range(KILLS)}

    def fault(loop):
        whom = plan.get(loop.state.step)
        if whom is None or loop.rank != (whom if isinstance(whom, int) else 0):
            return
        if not once(folder, str(loop.state.step)):
            return
        if isinstance(whom, int):
            die()
        os.kill(read_status(folder).memories[int(whom[-1])], signal.SIGKILL)

    finished = recovered(config(folder, steps=steps, restarts=2 * KILLS), fault)
    assert finished.outcome.step == steps
    assert logged(folder) == logged(tmp_path / "a")
    assert finished.outcome.first_loss == logged(folder)[0][1]
    ledger = read_ledger(folder)
    noticed = [step for step, whom in plan.items() if not str(whom).startswith("memory")]
    assert [incident.step for incident in ledger.incidents] == noticed
    assert all(0 <= incident.steps_lost <= 5 for incident in ledger.incidents)
    assert sum(ledger.parts.values()) == pytest.approx(ledger.wall)
    assert (ledger.state, ledger.steps) == ("ended", steps)
    assert left_behind(folder) == []


def test_a_stopped_rank_a_stopped_memory_and_a_flipped_bit_are_found(tmp_path):
    unbroken(config(tmp_path / "a", steps=17))
    folder = tmp_path / "b"

    def fault(loop):
        step, rank = loop.state.step, loop.rank
        if (step, rank) == (2, 1) and once(folder, "bit"):
            flip_bit(loop)
        if (step, rank) == (7, 3) and once(folder, "stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if (step, rank) == (11, 0) and once(folder, "memory"):
            os.kill(read_status(folder).memories[1], signal.SIGSTOP)

    recovered(config(folder, steps=17), fault)
    assert logged(folder) == logged(tmp_path / "a")
    bit, hang = read_ledger(folder).incidents
    assert (bit.cause, bit.rank, bit.step, bit.back_to) == ("corruption", 1, 5, 0)
    assert (hang.cause, hang.rank, hang.step, hang.back_to) == ("hang", 3, 7, 5)
    text = (folder / "recovery" / METRICS).read_text()
    assert 'cairn_job_incidents_total{cause="hang",rung="heal"} 1' in text
    assert "Wall time" in (folder / "report.html").read_text()
    assert left_behind(folder) == []


def test_ended_memories_do_not_stay_zombies(tmp_path):
    """One whose parent, the rank that has started it, lives; one of a dead rank; one that ends before its parent."""

    def fault(loop):
        step, status = loop.state.step, read_status(tmp_path)
        if step == 2 and loop.rank == 0 and once(tmp_path, "first"):
            for pid in status.memories.values():
                os.kill(pid, signal.SIGKILL)
        if step == 7 and loop.rank == 1 and once(tmp_path, "second"):
            os.kill(status.memories[1], signal.SIGKILL)
            die()
        if step == 12 and loop.rank == 0:
            os.kill(status.memories[1], signal.SIGKILL)
        if step == 16 and loop.rank == 0:
            deadline = time.monotonic() + 20
            parents = {status.driver, *(rank.pid for rank in status.ranks)}
            while (found := zombies_of(parents) - before) and time.monotonic() < deadline:
                time.sleep(0.05)
            (tmp_path / "zombies").write_text(str(sorted(found)))

    def zombies_of(parents):
        found = set()
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                name, _, rest = path.read_text().rpartition(")")
                if rest.split()[0] == "Z" and int(rest.split()[1]) in parents:
                    found.add(name)
        return found

    before = zombies_of({os.getpid()})  # children of earlier tests in this process
    finished = recovered(config(tmp_path, steps=17, layout=Layout(dp=2)), fault)
    assert finished.outcome.step == 17
    assert (tmp_path / "zombies").read_text() == "[]"
    assert left_behind(tmp_path) == []


def test_every_sample_once_through_kill_shrink_and_grow(tmp_path):
    unbroken(config(tmp_path / "a"))
    folder = tmp_path / "b"
    folder.mkdir()

    def fault(loop):
        """Writes down which samples this rank has read in which step of which life."""
        ids = list(loop.batches._make(loop.state.samples - 4)[0].ids)
        ids += [i for batch in loop.batches._make(loop.state.samples - 4)[1:] for i in batch.ids]
        epoch = int(os.environ["CAIRN_JOB_ATTEMPT"])
        line = json.dumps([epoch, loop.state.step, ids])
        with (folder / f"seen-{epoch}-{loop.rank}.jsonl").open("a") as file:
            file.write(line + "\n")
        if loop.state.step == 6 and loop.rank == 1 and once(folder, "kill"):
            die()
        if loop.state.step == 12 and loop.rank == 0 and once(folder, "node"):
            kill_node(folder, 1)
        if loop.world == 2:
            time.sleep(0.25)  # until the node is back

    said = []
    recovered(config(folder, rejoin_s=0.5), fault, lambda text: said.append(text))
    ledger = read_ledger(folder)
    assert [incident.rung for incident in ledger.incidents] == ["heal", "shrink"]
    assert "grow" in ledger.by_cause["restart"]

    lives = {}
    for path in folder.glob("seen-*.jsonl"):
        for line in path.read_text().splitlines():
            epoch, step, ids = json.loads(line)
            lives.setdefault(step, {}).setdefault(epoch, []).extend(ids)
    ranks = {len(list(folder.glob(f"seen-{epoch}-*"))) for epoch in range(4)}
    assert ranks == {4, 2}
    stayed = [sorted(by_epoch[max(by_epoch)]) for _, by_epoch in sorted(lives.items())]
    assert stayed == [list(range(4 * step, 4 * step + 4)) for step in range(24)]
    ours, theirs = logged(folder), logged(tmp_path / "a")
    assert [row[0] for row in ours] == list(range(1, 25))
    assert [row[1] for row in ours] == pytest.approx([row[1] for row in theirs], abs=5e-3)
    assert left_behind(folder) == []


def test_a_pipeline_is_rebuilt_for_the_ranks_that_are_left(tmp_path):
    model = msgspec.structs.replace(MODEL, layers=4)
    wanted = config(tmp_path / "a", steps=12, layout=Layout(pp=4), model=model)
    unbroken(wanted)
    folder = tmp_path / "b"

    def fault(loop):
        if loop.state.step == 7 and loop.rank == 3 and once(folder, "node"):
            wait_for_copies(loop, 5)
            kill_node(folder, 0)

    recovered(config(folder, steps=12, layout=Layout(pp=4), model=model), fault)
    (incident,) = read_ledger(folder).incidents
    assert (incident.rung, incident.back_to) == ("template", 5)
    assert read_status(folder).layout == Layout(pp=2)
    ours, theirs = ([row[1] for row in logged(f)] for f in (folder, tmp_path / "a"))
    assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_spare_takes_the_place_of_a_lost_node_and_a_rank_that_never_comes_back_is_found(tmp_path):
    unbroken(config(tmp_path / "a", steps=12, layout=Layout(dp=2)))
    folder = tmp_path / "b"

    def fault(loop):
        if loop.state.step == 8 and loop.rank == 0 and once(folder, "node"):
            wait_for_copies(loop, 5)
            kill_node(folder, 1)
        if loop.state.step == 10 and loop.rank == 1 and once(folder, "hang"):
            while True:
                time.sleep(0.1)

    asked = dict(spare_nodes=1, stuck_s=6)
    recovered(config(folder, steps=12, layout=Layout(dp=2), **asked), fault)
    incidents = {incident.step: incident for incident in read_ledger(folder).incidents}
    lost, hang = incidents[8], incidents[10]
    assert (lost.rung, lost.node, lost.back_to) == ("spare", 1, 5)
    assert (hang.cause, hang.rung, hang.rank) == ("hang", "heal", 1)
    assert "nothing moved for" in hang.why
    assert "; its last collective was gloo:" in hang.why
    assert "; rank 0 is in gloo:" in hang.why
    assert read_status(folder).nodes == [0, 2]
    assert logged(folder) == logged(tmp_path / "a")


def test_both_copies_lost_and_the_disk_carries_on(tmp_path):
    """Both memories and a rank at once: nothing is left in memory."""
    unbroken(config(tmp_path / "a", steps=12, layout=Layout(dp=2), every=4))
    folder = tmp_path / "b"

    def fault(loop):
        if loop.state.step == 7 and loop.rank == 0 and once(folder, "all"):
            loop.saver.wait()
            for pid in read_status(folder).memories.values():
                os.kill(pid, signal.SIGKILL)
            die()

    recovered(config(folder, steps=12, layout=Layout(dp=2), every=4, rejoin_s=1000), fault)
    (incident,) = read_ledger(folder).incidents
    assert incident.back_to == 4
    assert [row[0] for row in logged(folder)] == list(range(1, 13))
    assert left_behind(folder) == []


def test_a_rewind_leaves_no_copy_of_a_step_that_it_took_back(tmp_path):
    """The same steps come again with other samples: if a node was lost, copies of both would be mixed."""
    wanted = config(tmp_path, steps=8, layout=Layout(fsdp=2), every=4, memory_every=1)

    def fault(loop):
        reach, watch, done = loop.assignment.reach, loop.state.watch, loop.state.step
        found = [(one.rank, one.step) for one in ask_holdings(reach.addresses[0], reach.secret)]
        assert len(set(found)) == len(found), (done, found)
        assert all(step <= done for _, step in found), (done, found)

        def bad(*about):
            del watch.judge
            return Verdict("rewind", "as the test says")

        if done == 6 and once(tmp_path, f"bad-{loop.rank}"):
            watch.judge = bad

    finished = recovered(msgspec.structs.replace(wanted, bad_step=BadStep(action="rewind")), fault)
    assert (finished.outcome.step, finished.outcome.bad_steps) == (8, 1)


def test_a_rank_that_does_not_leave_is_ended_and_a_memory_has_no_socket_of_its_rank(
    tmp_path, monkeypatch
):
    """Nobody watches a rank that is done with training; an inherited socket would hide a rank's death from others."""
    leave = dist.destroy_process_group

    def hang_once():
        if dist.get_rank() == 1 and once(tmp_path, "leave"):
            time.sleep(600)
        leave()

    def sockets_of(pid):
        found = set()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # that of this listing
                found.add(os.readlink(path))
        return {name for name in found if name.startswith("socket:")}

    def fault(loop):
        if loop.state.step == 2:
            mine, memory = os.getpid(), read_status(tmp_path).memories[loop.rank]
            shared = sockets_of(mine) & sockets_of(memory)
            (tmp_path / f"shared-{loop.rank}").write_text(str(len(shared)))

    monkeypatch.setattr(dist, "destroy_process_group", hang_once)
    monkeypatch.setattr(local_driver, "LEAVE_S", 1.0)
    finished = recovered(config(tmp_path, steps=3, layout=Layout(dp=2)), fault)
    assert (finished.outcome.step, finished.outcome.stopped_early) == (3, False)
    (incident,) = read_ledger(tmp_path).incidents
    assert (incident.cause, incident.rank, incident.back_to) == ("hang", 1, 3)
    assert [(tmp_path / f"shared-{rank}").read_text() for rank in range(2)] == ["0", "0"]
    assert left_behind(tmp_path) == []


def test_a_mistake_of_the_program_is_told_and_not_tried_again(tmp_path):
    def fault(loop):
        if loop.state.step == 3 and loop.rank == 1:
            raise ZeroDivisionError("the program's own")

    with pytest.raises(RankFailed, match="the program's own"):
        recovered(config(tmp_path, layout=Layout(dp=2)), fault)
    ledger = read_ledger(tmp_path)
    assert (ledger.state, ledger.incidents[0].rung) == ("failed", "stop")
    assert left_behind(tmp_path) == []


def test_disk_object_store_and_the_end_on_request(tmp_path, monkeypatch):
    """Stopped by SIGTERM with a checkpoint; the disk is lost; the same command goes on from the far copy."""
    monkeypatch.setattr(guarded_loop, "every_steps", lambda *measured: 11)
    folder, far = tmp_path / "run", f"file://{tmp_path}/far"
    complete_steps, reads = folders.complete_steps, []
    monkeypatch.setattr(
        folders, "complete_steps", lambda root: reads.append(root) or complete_steps(root)
    )

    def wanted(steps):
        settings = dict(every=3, object_store=far, interval=True)
        return config(folder, steps=steps, layout=Layout(dp=2), **settings)

    def fault(loop):
        if loop.state.step == 7:  # there was a save after step 6
            (folder / f"every-{loop.rank}").write_text(str(loop.config.checkpoint.every))
        if loop.state.step in (1, 2) and loop.rank == 0:
            (folder / f"reads-{loop.state.step}").write_text(str(len(reads)))
        if (loop.state.step, loop.rank) == (4, 1) and once(folder, "kill"):
            loop.saver.wait()
            die()
        if loop.state.step == 7 and loop.rank == 0:
            os.kill(read_status(folder).driver, signal.SIGTERM)
            time.sleep(0.5)

    said = []
    stopped = recovered(wanted(100), fault, said.append).outcome
    assert stopped.stopped_early
    assert 7 <= stopped.step < 100
    (ended,) = [read_ledger(folder).incidents[0].cause]
    assert ended == "killed"
    assert [(folder / f"every-{rank}").read_text() for rank in range(2)] == ["11", "11"]
    # A step without a save does not read the folder, which may be on a slow file system.
    assert (folder / "reads-1").read_text() == (folder / "reads-2").read_text()
    shutil.rmtree(folder / "checkpoints")
    finished = recovered(wanted(stopped.step + 2)).outcome
    assert finished.step == stopped.step + 2
    assert [row[0] for row in logged(folder)] == list(range(1, finished.step + 1))
    assert read_ledger(folder).incidents == []  # a ledger is of one start of the command


def test_a_rank_that_computes_slowly_is_named_and_replaced_if_that_is_asked_for(tmp_path):
    """And not those who wait for it."""

    def slow(loop):
        if loop.state.step == 1 and loop.rank == 1 and once(tmp_path, "slow"):
            loss = loop.state.loss

            def late(*args):
                time.sleep(0.4)
                return loss(*args)

            loop.state.loss = late

    said, asked = [], dict(spare_nodes=1, slow_action="replace")
    recovered(config(tmp_path, steps=9, layout=Layout(dp=2), **asked), slow, said.append)
    assert '"what":"straggler","rank":1' in (tmp_path / "recovery" / "events.jsonl").read_text()
    ledger = read_ledger(tmp_path)
    first = ledger.incidents[0]
    assert (first.cause, first.rung, first.rank, first.node) == ("straggler", "spare", 1, 1)
    assert ledger.slow[0].rank == 1
    assert "times the others'" in ledger.slow[0].why
    assert ledger.by_cause["restart"]["straggler"] > 0
    assert [row[0] for row in logged(tmp_path)] == list(range(1, 10))


def test_the_ledger_is_served_as_metrics(tmp_path):
    path = tmp_path / METRICS
    server = serve_metrics(path, 0)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/metrics")
        path.write_text("cairn_job_ettr_ratio 0.5\n")
        with urllib.request.urlopen(f"{address}/metrics") as answer:
            assert answer.read() == b"cairn_job_ettr_ratio 0.5\n"
    finally:
        server.shutdown()
        server.server_close()


def test_more_nodes_than_ranks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"recovery.nodes 3 for 2 ranks"):
        recovered(config(tmp_path, layout=Layout(dp=2), nodes=3))
    with pytest.raises(ConfigError, match="4 ranks do not divide"):
        recovered(config(tmp_path, nodes=3))


def test_copies_that_no_other_node_takes_are_reported(tmp_path, monkeypatch):
    """The peer of the copies cannot be reached: nobody says that two nodes hold them."""
    nowhere = "127.0.0.1:9"
    monkeypatch.setattr(
        launched, "keep_at", lambda at, keeper, secret: keep_at(at, nowhere, secret)
    )
    said = []
    recovered(config(tmp_path, steps=12, layout=Layout(dp=2)), log_line=said.append)
    (warned,) = [text for text in said if text.startswith("warning: only one node holds")]
    assert "the run goes back to the newest checkpoint on disk" in warned
    assert [text for text in said if "copies in memory were held by one node only" in text]
    assert read_status(tmp_path).doubled == -1
    ledger = read_ledger(tmp_path)
    assert (ledger.copied, ledger.doubled) == (5, -1)
    metrics = (tmp_path / "recovery" / METRICS).read_text()
    assert "cairn_job_doubled_steps -1" in metrics


@pytest.mark.parametrize(("first", "second"), [*product(["plain", "recovery"], repeat=2)])
def test_two_runs_never_share_a_folder(tmp_path, first, second):
    start = {
        "plain": lambda: run(recipe(tmp_path, steps=10**6), log_line=lambda text: None),
        "recovery": lambda: recovered(config(tmp_path, steps=10**6, layout=Layout(dp=2))),
    }
    holder = multiprocessing.get_context("fork").Process(target=start[first])
    holder.start()
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "log.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(ConfigError, match=f"another run writes to .* process {holder.pid} on"):
            start[second]()
    finally:
        holder.kill()
        holder.join()
