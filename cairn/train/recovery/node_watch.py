"""Every node of a launched job watches its ranks, and one of them watches all: who hangs, who is slow.

    node a: ranks --board--> watch (leads) <--reports, orders--> watch <--board-- ranks :node b
                               '-- Leader: finds, decides, writes it down

Part of the process that keeps the node's copies (`node_memory`), which calls `tick` a few times a second. A rank that
is stopped is ended by its own node; for the rest each node tells the leader what it sees, over a connection that it
made itself, and ends whom the leader names. Both ends of it prove that they know the job's secret: no other can give
orders, or tell of ranks. Ends only ranks of its own board.
"""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from cairn.core.client_authenticator import ClientAuthenticator
from cairn.core.end_reason import EndReason, write_end_reason
from cairn.core.shared_secret import Secret, check_open
from cairn.train.recovery.failure_detection import patience
from cairn.train.recovery.findings import WatchFinding, read_found, write_found
from cairn.train.recovery.leader import LEAVE, Leader, answer
from cairn.train.recovery.node_report import Duty, NodeReport, Order, ranks_of, report_of, stall_of
from cairn.train.recovery.process_state import process_state
from cairn.train.recovery.status_board import DONE, Board
from cairn.train.recovery.watch_link import BACKLOG, CALL_S, Door, Link, call

DUTY = "duty.json"  # in the node's folder: what is to be done
REPORT_S = 0.4  # between two messages to the leader
LAST_LINE_S = 1.0  # for the line that a rank's wrapper writes about its end, before the node leaves


class NodeWatch:
    def __init__(
        self,
        folder: Path,
        board: Board,
        host: str,
        launcher: int | None,
        silent_s: float,
        secret: Secret | None = None,
    ) -> None:
        """`launcher`: ended when the node has to leave; None where it has other nodes, too."""
        check_open(host, secret, "the watch of a node")
        self.folder, self.board, self.launcher, self.silent_s = folder, board, launcher, silent_s
        self.secret = secret
        self.door = Door(
            folder, host, ClientAuthenticator(secret, "the watch of a node", waiting=BACKLOG)
        )
        self.duty: Duty | None = None
        self.reported: dict[int, int] = {}  # rank -> the last step that was reported
        self.report_at = self.call_at = 0.0
        self.leave_at: float | None = None
        self.left = False  # this node is not to be used any more
        self.link: Link | None = None  # to the leader
        self.others: dict[Link, str] = {}  # of the leader: link -> the node behind it
        self.leader: Leader | None = None
        self.dragged_s = 0.0  # in the lives before

    def tick(self) -> None:
        """Never raises: the copies that this process keeps matter more."""
        try:
            self._look()
        except (OSError, msgspec.DecodeError):
            pass  # a broken connection, a file that is being written: the next time
        except Exception:  # noqa: BLE001  a mistake in here must not cost the state of the ranks
            traceback.print_exc()  # into the node's log

    def _look(self) -> None:
        end_silent(self.board, self.silent_s, self._ended_here)
        self._read_duty()
        now = time.monotonic()
        if self.leave_at is not None and now >= self.leave_at:
            self._leave()
        if self.duty is None or now < self.report_at:
            return
        self.report_at = now + REPORT_S
        report = report_of(self.board, self.folder, self.duty, self.reported)
        if self.leader is not None:
            self._lead(self.leader, report, now)
        else:
            self._follow(report, now)

    def _leave(self) -> None:
        """With all that runs here."""
        self.left = True
        if self.launcher is not None:
            os.kill(self.launcher, signal.SIGKILL)
            return
        for pid in self.board.ranks["pid"].tolist():
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _read_duty(self) -> None:
        path = self.folder / DUTY
        if not path.exists():
            return
        duty = msgspec.json.decode(path.read_bytes(), type=Duty)
        if self.duty is not None and duty.life == self.duty.life:
            return
        self.duty, self.reported, self.silent_s = duty, {}, duty.settings.silent_s
        if self.leader is not None:
            self.dragged_s += self.leader.slowness.dragged_s
        self.leader = None
        self._hang_up()
        self.call_at = 0.0
        if duty.leads:
            self.leader = Leader(duty, read_found(duty.run), time.monotonic())

    def _hang_up(self) -> None:
        for link in (*self.others, *([self.link] if self.link is not None else [])):
            link.close()
        self.others, self.link = {}, None

    def close(self) -> None:
        self._hang_up()
        self.door.close()

    # -- the leader --------------------------------------------------------------------------------------

    def _lead(self, leader: Leader, own: NodeReport, now: float) -> None:
        self._listen(leader, now)
        leader.take(own, now)
        for decision in leader.judge(now, time.time()):
            self._write_down(decision.found)
            if decision.order is not None:
                self._send(decision.order, decision.node)
        dragged_s = self.dragged_s + leader.slowness.dragged_s
        self.board.head["dragged_ns"][0] = int(dragged_s * 1e9)

    def _listen(self, leader: Leader, now: float) -> None:
        for connection in self.door.let_in():
            self.others[Link(connection)] = ""
        for link in list(self.others):
            try:
                lines = link.lines()
                reports = [msgspec.json.decode(line, type=NodeReport) for line in lines or ()]
            except msgspec.DecodeError:  # a stranger's bytes
                lines, reports = None, []
            if lines is None or any(report.life != leader.duty.life for report in reports):
                link.close()
                del self.others[link]
                continue
            for report in reports:
                self.others[link] = report.node
                leader.take(report, now)

    def _send(self, order: Order, node: str) -> None:
        if self.duty is not None and node == self.duty.node:
            self._execute(order)
        for link, name in self.others.items():
            if name == node:
                link.send(order)

    def _write_down(self, finding: WatchFinding) -> None:
        if self.duty is not None:
            write_found(self.duty.run, finding)
            self.board.head["findings"][0] += 1

    # -- the others --------------------------------------------------------------------------------------

    def _follow(self, report: NodeReport, now: float) -> None:
        if self.link is None:
            if now < self.call_at or self.duty is None:
                return
            self.call_at = now + 2 * CALL_S
            host, _, port = self.duty.leader.rpartition(":")
            self.link = call(host, int(port), self.secret)
        orders = self.link.lines()
        if orders is None or not self.link.send(report):
            self.link.close()
            self.link = None
            return
        for line in orders:
            self._execute(msgspec.json.decode(line, type=Order))

    def _execute(self, order: Order) -> None:
        """Only what lives here, and only in this life."""
        if self.duty is None or order.life != self.duty.life:
            return
        pid = int(self.board.ranks["pid"][order.rank])
        if not pid or int(self.board.ranks["epoch"][order.rank]) != order.life:
            return
        note = stall_of(self.board, self.folder, order.rank)
        reason = order.reason
        if note is not None:
            reason = msgspec.structs.replace(reason, words=note.stack, collective=note.collective)
        end_rank(self.board, order.rank, reason)
        if order.leave:
            self.leave_at = time.monotonic() + LAST_LINE_S

    def _ended_here(self, rank: int, reason: EndReason, silent_s: float) -> None:
        """A rank that was stopped: found here, and written down for the ledger."""
        duty = self.duty
        if duty is None:
            return
        now, here = time.time(), len(ranks_of(self.board, duty.life)) + 1
        response = answer(
            duty,
            read_found(duty.run),
            reason.cause,
            rank,
            reason.why,
            place=f"{duty.host}/{duty.node}",
            nodes=max(1, duty.world // here),
        )
        self._write_down(
            WatchFinding(
                at=now,
                since=now - silent_s,
                what="silence",
                cause=reason.cause,
                rank=rank,
                node=duty.node,
                host=duty.host,
                step=reason.step or 0,
                why=reason.why,
                rung=response.rung,
            )
        )
        if response.rung in LEAVE and duty.replaced:
            self.leave_at = time.monotonic() + LAST_LINE_S


def end_silent(
    board: Board, silent_s: float, report: Callable[[int, EndReason, float], None] | None = None
) -> list[int]:
    """Ranks that have begun and give no sign of life: ended, so that their launcher sees it."""
    ended = []
    now = time.monotonic_ns()
    for rank in board.ranks["pid"].nonzero()[0].tolist():
        line = board.ranks[rank]
        pid, beat = int(line["pid"]), int(line["beat_ns"])
        state = process_state(pid)
        if state in ("", "Z"):
            board.ranks["pid"][rank] = 0  # its number may be given to another process
            continue
        silent = (now - beat) / 1e9
        if not beat or line["phase"] == DONE or silent <= patience(state, silent_s):
            continue
        how = "stopped" if state == "T" else "swapped out, or held up in native code"
        why = f"no sign of life for {silent:.1f} s: the process is {how}"
        reason = EndReason(cause="hang", why=why, step=int(line["step"]))
        if end_rank(board, rank, reason):
            ended.append(rank)
            if report is not None:
                report(rank, reason, silent)
    return ended


def end_rank(board: Board, rank: int, reason: EndReason) -> bool:
    """With the reason for the process that waits for it; once."""
    pid = int(board.ranks["pid"][rank])
    board.ranks["pid"][rank] = 0
    with contextlib.suppress(ProcessLookupError, PermissionError):
        write_end_reason(pid, reason)
        os.kill(pid, signal.SIGKILL)
        return True
    return False
