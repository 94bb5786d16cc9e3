"""One watch sees all nodes of a launched job: who hangs, who is slow, what is done; the rules, then over sockets."""

import contextlib
import os
import signal
import socket
import subprocess
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.end_reason import VARIABLE, EndReason, path_of, read_end_reason, write_end_reason
from cairn.core.errors import ConfigError
from cairn.core.shared_secret import Secret, enter
from cairn.train.recovery.findings import WatchFinding, forget_found, read_found, write_found
from cairn.train.recovery.leader import AGAIN_S, Leader
from cairn.train.recovery.node_report import Duty, NodeReport, RankReport
from cairn.train.recovery.node_watch import DUTY, NodeWatch
from cairn.train.recovery.settings import Recovery
from cairn.train.recovery.stall_note import read_note, stall_path
from cairn.train.recovery.stall_writer import StallWriter, main_stack
from cairn.train.recovery.status_board import STARTING, TRAINING, Board
from cairn.train.recovery.watch_link import DOOR, call

SETTINGS = Recovery(on=True, silent_s=1, stuck_s=60, start_s=300, same_place=3, restarts=9)
LIFE = 77
SECRET = Secret(b"of this job")


def duty(**changes):
    given = dict(
        life=LIFE,
        leader="h:1",
        leads=True,
        node="n0",
        host="h0",
        world=4,
        run="",
        settings=SETTINGS,
        replaced=True,
        least=4,
    )
    return Duty(**(given | changes))


def report(node, *ranks, life=LIFE):
    return NodeReport(life=life, node=f"n{node}", host=f"h{node}", ranks=ranks)


def rank(number, **changes):
    given = dict(rank=number, phase=TRAINING, step=7, collectives=40)
    return RankReport(**(given | changes))


def both(leader, *ranks, now=0.0):
    """Ranks 0, 1 on node 0 and 2, 3 on node 1."""
    leader.take(report(0, *ranks[:2]), now)
    leader.take(report(1, *ranks[2:]), now)


def stuck(leader, *ranks, now=200.0):
    both(leader, *ranks, now=100.0)
    leader.judge(100.0, 1000.0)
    both(leader, *ranks, now=now)
    return leader.judge(now, 1000.0 + now - 100.0)


WAITING = dict(collective="gloo:all_reduce #41", collectives=41)


def hung(number=3):
    """All wait in a collective that one of them never began."""
    return [
        rank(n, collective="gloo:all_reduce #40", waits=False)
        if n == number
        else rank(n, **WAITING)
        for n in range(4)
    ]


def test_who_hangs_is_named_with_its_node_step_and_collective():
    (decision,) = stuck(Leader(duty(), [], 0.0), *hung(3))
    found, order = decision.found, decision.order
    assert (found.what, found.cause, found.rank, found.step) == ("stuck", "hang", 3, 7)
    assert (found.host, found.node, found.rung) == ("h1", "n1", "heal")
    assert found.at - found.since == 100.0
    assert "its last collective was gloo:all_reduce #40" in found.why
    assert "rank 0 is in gloo:all_reduce #41" in found.why
    assert (order.rank, order.life, order.leave, order.reason.cause) == (3, LIFE, False, "hang")


def test_of_ranks_in_the_same_collective_the_one_that_waits_for_nobody_is_the_suspect():
    ranks = [rank(n, **WAITING) for n in range(4)]
    ranks[2] = rank(2, **(WAITING | dict(waits=False)))
    assert stuck(Leader(duty(), [], 0.0), *ranks)[0].order.rank == 2


def test_a_node_that_hangs_again_and_again_is_left_if_somebody_replaces_it():
    known = [found_on("n1")] * 2
    (replaced,) = stuck(Leader(duty(), known, 0.0), *hung())
    assert (replaced.found.rung, replaced.order.leave) == ("spare", True)
    (smaller,) = stuck(Leader(duty(least=2), known, 0.0), *hung())
    assert (smaller.found.rung, smaller.order.leave) == ("shrink", True)
    (nobody,) = stuck(Leader(duty(replaced=False), known, 0.0), *hung())
    assert (nobody.found.rung, nobody.order.leave) == ("heal", False)
    (elsewhere,) = stuck(Leader(duty(), [found_on("n0")] * 2, 0.0), *hung())
    assert elsewhere.found.rung == "heal"
    (told,) = stuck(Leader(duty(), [found_on("n1", rung="tell")] * 5, 0.0), *hung())
    assert told.found.rung == "heal"


def found_on(node, rung="heal"):
    return WatchFinding(
        at=1.0,
        since=0.0,
        what="stuck",
        cause="hang",
        rank=3,
        node=node,
        host="h1" if node == "n1" else "h0",
        step=5,
        why="",
        rung=rung,
    )


def test_an_order_that_nobody_follows_ends_a_rank_that_can_be_reached():
    leader = Leader(duty(), [], 0.0)
    assert stuck(leader, *hung())[0].order.rank == 3
    both(leader, *hung(), now=200.0 + AGAIN_S)
    assert leader.judge(200.0 + AGAIN_S / 2, 0.0) == []
    (again,) = leader.judge(200.0 + AGAIN_S, 0.0)
    assert (again.order.rank, again.order.leave, again.node, again.found.rank) == (
        0,
        False,
        "n0",
        3,
    )
    assert "does not follow orders" in again.found.why


def test_nobody_is_judged_before_all_are_there_or_after_one_has_gone():
    leader = Leader(duty(), [], 0.0)
    leader.take(report(0, rank(0), rank(1)), 1000.0)
    assert leader.judge(1000.0, 0.0) == []
    leader.take(report(1, rank(2), rank(3), life=5), 2000.0)  # of another life
    assert leader.judge(2000.0, 0.0) == []
    leader.take(report(1, rank(2)), 3000.0)
    assert leader.judge(3000.0, 0.0) == []
    late = Leader(duty(), [], 0.0)
    both(late, rank(0), rank(1), rank(2), rank(3, phase=STARTING), now=300.0)
    assert late.judge(299.0, 0.0) == []
    assert late.judge(301.0, 0.0)[0].found.what == "late"


def test_a_node_that_is_not_heard_any_more_is_not_judged_by_what_it_said_last():
    """It may be gone, which others find out; only if nothing moves for long, those who are left begin again."""
    leader = Leader(duty(), [], 0.0)
    both(leader, *hung(3), now=100.0)
    leader.judge(100.0, 0.0)
    for now in (105.0, 159.0, 162.0):
        leader.take(report(0, *hung(3)[:2]), now)
        found = leader.judge(now, now)
    (decision,) = found
    assert (decision.found.cause, decision.order.rank, decision.found.rung) == (
        "network",
        0,
        "redo",
    )
    assert "node h1/n1 did not report for 62.0 s" in decision.found.why
    assert (decision.found.place, decision.node) == (
        "h1/n1",
        "n0",
    )  # who is blamed, who begins again


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 59.0)), max_size=30), st.integers(0, 3))
def test_whatever_moves_within_the_patience_is_no_hang_and_what_does_not_is_found_in_time(
    moves, victim
):
    leader, collectives, now = Leader(duty(), [], 0.0), [40] * 4, 0.0
    both(leader, *(rank(n) for n in range(4)))
    leader.judge(now, now)
    for mover, later in moves:
        now += later
        collectives[mover] += 1
        both(leader, *(rank(n, collectives=c) for n, c in enumerate(collectives)), now=now)
        assert leader.judge(now, now) == []
    most = max(collectives) + 1
    last = [rank(n, collectives=0 if n == victim else most) for n in range(4)]
    both(leader, *last, now=now)
    assert leader.judge(now, now) == []
    both(leader, *last, now=now + 59.9)
    assert leader.judge(now + 59.9, now) == []
    (decision,) = leader.judge(now + 60.1, now + 60.1)
    assert (decision.found.rank, decision.found.since) == (victim, pytest.approx(now))


def spent(step, slow=(), busy=0.1, slower=0.5):
    """Steps as two nodes tell of them: rank -> (step, computed, whole)."""
    return [
        rank(n, step=step, spent=((step, slower if n in slow else busy, slower + 0.02),))
        for n in range(4)
    ]


def test_a_straggler_is_named_with_compute_against_network_and_again_when_it_is_over():
    leader, told = Leader(duty(), [], 0.0), []
    for step in range(1, 15):
        ranks = spent(step, slow=(2,) if 4 <= step < 10 else ())
        leader.take(report(0, *ranks[:2]), float(step))
        told += leader.judge(float(step), float(step))  # the other node's word comes later
        leader.take(report(1, *ranks[2:]), step + 0.5)
        told += leader.judge(step + 0.5, step + 0.5)
    assert [(one.found.what, one.found.step, one.found.rank, one.order) for one in told] == [
        ("straggler", 6, 2, None),
        ("straggler over", 12, 2, None),
    ]
    why = told[0].found.why
    assert "computes 0.500 s of a step, 5.0 times the others' 0.100 s, who wait 0.420 s" in why
    assert "network and the rest of its step take 0.020 s" in why
    assert leader.slowness.dragged_s == pytest.approx(4 * 0.4)  # from the third slow step on


@pytest.mark.parametrize(
    ("changes", "rung"),
    [(dict(), "spare"), (dict(least=2), "shrink"), (dict(replaced=False), "tell")],
)
def test_a_straggler_is_replaced_where_that_is_asked_for(changes, rung):
    settings = msgspec.structs.replace(SETTINGS, slow_action="replace")
    leader, told = Leader(duty(settings=settings, **changes), [], 0.0), []
    for step in range(1, 9):
        both(leader, *spent(step, slow=(2,)), now=float(step))
        told += leader.judge(float(step), float(step))
    (one,) = told
    assert (one.found.cause, one.found.rung) == ("straggler", rung)
    assert (one.order is not None and one.order.leave) == (rung != "tell")


# -- with processes and sockets ------------------------------------------------------------------------


def test_whoever_ends_a_process_says_why_and_whoever_waits_reads_it_once(tmp_path):
    where = tmp_path / "why"
    sleeper = subprocess.Popen(["sleep", "60"], env={VARIABLE: str(where)})
    try:
        reason = EndReason(cause="hang", why="nothing moved", step=7, collective="all_reduce")
        while path_of(sleeper.pid) is None:  # it has not begun yet
            time.sleep(0.01)
        assert path_of(sleeper.pid) == where
        assert write_end_reason(sleeper.pid, reason)
        assert read_end_reason(where) == reason
        assert read_end_reason(where) is None
        assert not write_end_reason(os.getpid(), reason) or VARIABLE in os.environ
    finally:
        sleeper.kill()
        sleeper.wait()


def test_findings_are_read_back_whole_and_a_cut_line_is_left_out(tmp_path):
    for node in ("n0", "n1"):
        write_found(tmp_path, found_on(node))
    with (tmp_path / "recovery" / "findings.jsonl").open("ab") as file:
        file.write(b'{"at": 1.0, "si')
    assert read_found(tmp_path) == [found_on("n0"), found_on("n1")]
    forget_found(tmp_path)
    assert read_found(tmp_path) == []


def test_a_rank_that_stands_still_leaves_its_stack_until_it_moves(tmp_path):
    path = stall_path(tmp_path, 3)
    writer = StallWriter(path, stuck_s=0.0)
    writer.after_s = 0.0
    writer.look(5, 10)
    assert read_note(path, os.getpid()) is None
    writer.look(5, 10)
    note = read_note(path, os.getpid())
    assert (note.step, note.collectives, note.collective) == (5, 10, "none")
    assert "test_a_rank_that_stands_still" in note.stack
    assert read_note(path, os.getpid() + 1) is None
    writer.look(5, 11)
    assert not path.exists()
    assert "main_stack" in main_stack()


class FakeNode:
    """A watch with a board of its own; its rank is a process that sleeps."""

    def __init__(self, folder, number, leader=None, secret=SECRET):
        folder.mkdir()
        self.folder, self.board, self.number = folder, Board(2, 1), number
        self.why = folder / "why"
        self.launcher = subprocess.Popen(["sleep", "60"])
        self.rank = subprocess.Popen(["sleep", "60"], env={VARIABLE: str(self.why)})
        self.watch = NodeWatch(folder, self.board, "127.0.0.1", self.launcher.pid, 1000.0, secret)
        self.address = (folder / DOOR).read_text()
        given = duty(
            leader=leader or self.address,
            leads=leader is None,
            node=f"n{number}",
            world=2,
            run=str(folder.parent),
            settings=msgspec.structs.replace(SETTINGS, stuck_s=0.2, same_place=1),
            least=2,
        )
        (folder / DUTY).write_bytes(msgspec.json.encode(given))
        self.board.set(
            number, pid=self.rank.pid, epoch=LIFE, phase=TRAINING, step=3, collectives=9 - number
        )

    def beat(self):
        self.board.set(self.number, beat_ns=time.monotonic_ns())
        self.watch.tick()

    def end(self):
        for process in (self.rank, self.launcher):
            process.kill()
            process.wait()
        self.watch.close()


@pytest.mark.timeout(60)
def test_the_leader_has_a_rank_of_another_node_ended_and_the_node_with_it(tmp_path):
    """Real sockets, real processes; the node of the rank that is behind is left, as it may fail only once."""
    first = FakeNode(tmp_path / "a", 0)
    second = FakeNode(tmp_path / "b", 1, first.address)
    try:
        while second.launcher.poll() is None:
            first.beat()
            second.beat()
            time.sleep(0.01)
        assert second.rank.wait(30) == -signal.SIGKILL
        assert (first.rank.poll(), first.launcher.poll()) == (None, None)
        reason = read_end_reason(second.why)
        assert (reason.cause, reason.step) == ("hang", 3)
        assert "it has begun 8 collectives, others up to 9" in reason.why
        (found,) = read_found(tmp_path)
        assert (found.rank, found.node, found.rung) == (1, "n1", "spare")
        assert int(first.board.head["findings"][0]) == 1
    finally:
        first.end()
        second.end()


def knock(node, said, secret=None):
    """A stranger who sends these bytes, once it has entered with this secret; what its node knows of others then."""
    host, _, port = node.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        with contextlib.suppress(OSError):
            if secret is not None:
                enter(stranger, secret, 5.0)
            stranger.sendall(said)
            stranger.recv(1024)
        until = time.monotonic() + 0.3
        while time.monotonic() < until and not node.watch.others:
            node.watch.report_at = 0.0
            node.beat()
        return dict(node.watch.others)


def test_rubbish_at_the_door_harms_nobody(tmp_path):
    node = FakeNode(tmp_path / "a", 0)
    try:
        node.beat()
        order = dict(life=LIFE, rank=0, reason=dict(cause="hang", why="x"))
        knock(node, b"GET / HTTP/1.0\r\n\r\n" + msgspec.json.encode(order) + b"\n")
        assert node.rank.poll() is None
    finally:
        node.end()


@pytest.mark.timeout(60)
def test_only_a_node_that_knows_the_secret_of_the_job_is_listened_to(tmp_path):
    node = FakeNode(tmp_path / "a", 0)
    told = msgspec.json.encode(report(1, rank(1, step=99))) + b"\n"
    try:
        node.beat()
        assert knock(node, told) == knock(node, told, Secret(b"of another job")) == {}
        assert "h1/n1" not in node.watch.leader.reports
        host, _, port = node.address.rpartition(":")
        link = call(host, int(port), SECRET)
        link.connection.sendall(told)
        while "h1/n1" not in node.watch.leader.reports:
            node.watch.report_at = 0.0
            node.beat()
        link.close()
    finally:
        node.end()


def test_off_this_machine_a_watch_does_not_listen_without_a_secret(tmp_path):
    with pytest.raises(ConfigError, match="without a secret"):
        NodeWatch(tmp_path, Board(2, 1), "0.0.0.0", None, 1.0)
