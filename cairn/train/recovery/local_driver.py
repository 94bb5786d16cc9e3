"""A run with recovery on one machine: its nodes are groups of ranks, and this process starts them again.

    cairn train  (driver)
     |-- rank 0, rank 1  ..  memory of node 0   copies, and the watch that finds who hangs (`node_memory`, `node_watch`)
     '-- rank 2, rank 3  ..  memory of node 1

    start the ranks -> listen --all done--> result
        ^                |---a rank has ended--> whose fault? (`evidence`) -> what now? (`ladder`) --.
        |                '---a node is back--> pause after a copy in memory -> larger layout --------|
        '--------------------------------------------------------------------------------------------'

The ranks are those of a launched job (`launched`): they agree among themselves from which step they go on. If the
driver is killed the kernel ends all of them, and the same command goes on from disk.
"""

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec

from cairn.core.errors import CairnError
from cairn.core.events import instant
from cairn.core.job_events import Ended, Failed
from cairn.train.checkpoint.peer_placement import node_of
from cairn.train.config import Train
from cairn.train.launch import Failure, RankFailed, first_failure
from cairn.train.metrics_log import Record
from cairn.train.recovery import evidence
from cairn.train.recovery.children import adopt_orphans, end_process, reap
from cairn.train.recovery.findings import WatchFinding, read_found, write_found
from cairn.train.recovery.journal import Journal, RankStatus, Status, write_status
from cairn.train.recovery.ladder import Incident, Response, grown, respond
from cairn.train.recovery.local_layouts import check_nodes, layouts_that_fit
from cairn.train.recovery.local_nodes import LocalNodes
from cairn.train.recovery.node_memory import Node, node_of_driver
from cairn.train.recovery.process_state import is_ending
from cairn.train.recovery.rank_process import (
    LocalRank,
    Placement,
    end_ranks,
    node_name,
    start_rank,
)
from cairn.train.recovery.status_board import GO_ON, PAUSE, PHASES, STARTING, STOP, Board
from cairn.train.run_lock import exclusive_run
from cairn.train.stop_signals import forwarding, send

TICK_S = 0.1
LEAVE_S = 30.0  # after the last barrier, for every rank to leave its process group
LogLine = Callable[[str], None]


class Requeue(CairnError):
    """Too little is left here to go on; a scheduler has to find other nodes."""

    exit_status = 75  # EX_TEMPFAIL: try again elsewhere


def run_on_nodes(
    config: Train,
    device: str = "cpu",
    log_line: LogLine = print,
    on_record: Callable[[Record], None] = lambda record: None,
) -> Any:
    """What rank 0 returned, however many ranks died on the way. `on_record` gets each step's record from rank 0."""
    check_nodes(config)
    config.folder.mkdir(parents=True, exist_ok=True)
    with exclusive_run(config.folder), tempfile.TemporaryDirectory(prefix="cairn-") as folder:
        driver = LocalDriver(config, device, log_line, Path(folder), on_record)
        try:
            with forwarding(driver.pids) as stopping:
                return driver.run(stopping)
        finally:
            driver.end()


class LocalDriver:
    def __init__(
        self,
        config: Train,
        device: str,
        log_line: LogLine,
        folder: Path,
        on_record: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self.asked, self.config, self.device, self.log_line = config, config, device, log_line
        self.on_record = on_record
        self.settings, self.folder = config.recovery, folder
        self.fits = layouts_that_fit(config)
        nodes, spares = self.settings.nodes, self.settings.spare_nodes
        self.nodes = LocalNodes(config.parallel, nodes, spares)
        self.homes: list[Node] = [node_of_driver(number) for number in range(nodes + spares)]
        self.boards: list[Board] = [home.board() for home in self.homes]
        self.ranks: list[LocalRank] = []
        self.memories: set[tuple[int, int]] = set()  # process ids, and when each began
        self.reaped: set[tuple[int, int]] = (
            set()
        )  # of those, the ended ones: their ids may be used again
        self.life = 0
        self.same: tuple[str, int, int] = ("", -1, 0)  # cause, step, how often in a row
        self.known = 0  # findings of earlier lives
        self.stopping = threading.Event()
        adopt_orphans(True)  # a memory whose rank has ended is ours to wait for

    # -- the run --------------------------------------------------------------------------------------

    def run(self, stopping: threading.Event) -> Any:
        self.stopping = stopping
        while True:
            self._start()
            result = self._watch()
            if result is not None:
                if result[0].outcome.stopped_early:
                    self._close_ledger(Ended(at=time.time()))
                return result[0]
            end_ranks(self.ranks)
            self.life += 1

    def _start(self) -> None:
        world = self.config.parallel.world()
        self.known = len(read_found(self.config.folder)) if self.life else 0
        for board in self.boards:
            board.order(STOP if self.stopping.is_set() else GO_ON)
            board.ranks["phase"][:world] = board.ranks["pid"][:world] = 0
        local: dict[int, int] = {}
        self.ranks = []
        for rank in range(world):
            node = node_of(rank, world, self.nodes.used)
            local[node] = local.get(node, -1) + 1
            self.ranks.append(start_rank(self._placement(rank, node, local[node])))
        self.started, self.trained = time.monotonic(), False
        self.first_done = 0.0  # when a rank had passed the last barrier

    def _placement(self, rank: int, node: int, local: int) -> Placement:
        least = self.config.parallel.world() if self.nodes.survivors().spares else 1
        return Placement(
            config=self.config,
            rank=rank,
            node=node,
            local=local,
            life=self.life,
            least=least,
            driver=os.getpid(),
            folder=self.folder,
            device=self.device,
        )

    def _watch(self) -> tuple[Any] | None:
        """The result, once all are done; None when the ranks have to be started again."""
        while True:
            wait([rank.pipe for rank in self.ranks if not rank.over], timeout=TICK_S)
            self._listen()
            self._reap_memories()
            self._write_status()
            words = {rank.word for rank in self.ranks}
            if words == {"done"}:
                end_ranks(self.ranks)
                return (self.ranks[0].value,)
            if words <= {"paused", "done"}:
                return None
            if words & {"failed", "gone"} or self._late() or self._leaves_late(words):
                self._answer()
                return None
            self._grow_if_possible()

    def _listen(self) -> None:
        for rank in self.ranks:
            rank.listen(self.log_line, self.on_record)

    def _reap_memories(self) -> None:
        """A memory outlives the rank that has started it, and becomes a child of this process."""
        self.memories |= {self._memory(node) for node in range(len(self.boards))}
        self.reaped |= {one for one in self.memories - self.reaped if one[0] and reap(one[0])}

    def _memory(self, node: int) -> tuple[int, int]:
        line = self.boards[node].nodes[0]
        return int(line["pid"]), int(line["began_ns"])

    def _late(self) -> bool:
        """Return whether a rank has not begun to train in time; it is ended, and so the cause is known."""
        phases = [int(self._line(rank)["phase"]) for rank in range(len(self.ranks))]
        self.trained = self.trained or min(phases) > STARTING
        waited = time.monotonic() - self.started
        if self.trained or waited <= self.settings.start_s:
            return False
        rank = phases.index(min(phases))
        why = f"not started after {waited:.0f} s"
        self._record("late", "hang", rank, self.ranks[rank].node, why, "heal", time.time() - waited)
        send([self.ranks[rank].process.pid], 9)
        return True

    def _leaves_late(self, words: set[str | None]) -> bool:
        """Return whether a rank has not left although others have. All pass the last barrier together, so it hangs.

        Its state is on disk: the ranks that are started again have nothing left to train.
        """
        if words != {"done", None}:
            return False
        now = time.monotonic()
        self.first_done = self.first_done or now
        if now - self.first_done <= LEAVE_S:
            return False
        rank = next(number for number, one in enumerate(self.ranks) if not one.over)
        why = f"not gone {LEAVE_S:.0f} s after the others were done"
        since = time.time() - LEAVE_S
        self._record("late", "hang", rank, self.ranks[rank].node, why, "heal", since)
        send([self.ranks[rank].process.pid], 9)
        return True

    def _line(self, rank: int) -> Any:
        """What the board of its node shows of a rank."""
        return self.boards[self.ranks[rank].node].ranks[rank]

    # -- a rank has ended ------------------------------------------------------------------------------

    def _answer(self) -> None:
        failures = evidence.collect(self.ranks, self._memory_gone, self._listen)
        incident, since = self._incident(failures)
        end_ranks(self.ranks)
        self.nodes.blame(incident.node)
        response = respond(incident, self.nodes.survivors(), self.settings, self.fits)
        if response.rung == "tell":
            # It has ended all the same: the ranks start again where they were.
            response = msgspec.structs.replace(response, rung="heal")
        cause, rank, node, why = incident.cause, incident.rank, incident.node, incident.why
        self._record("decision", cause, rank, node, why, response.rung, since)
        self.log_line(f"{_who(incident)}: {cause} ({why}); {response.rung}: {response.why}")
        instant("recovery", cause=cause, rung=response.rung)
        if response.rung in ("stop", "requeue"):
            now = time.time()
            failed = Failed(
                at=now, since=since, cause=cause, why=why, rank=rank, node=node, rung=response.rung
            )
            self._close_ledger(failed, Ended(at=now, finished=False))
            raise _as_error(incident, response, failures)
        self.nodes.apply(response, why, time.monotonic())
        if response.layout is not None:
            self.config = msgspec.structs.replace(self.asked, parallel=response.layout)

    def _incident(self, failures: list[Failure]) -> tuple[Incident, float]:
        """And since when all was not well any more, by the wall clock."""
        findings = [one for one in read_found(self.config.folder)[self.known :] if one.ends]
        blame = evidence.blame(self.ranks, failures, findings)
        rank = blame.rank
        node = None if rank is None else self.ranks[rank].node
        lost = blame.cause != "straggler" and self._node_lost(node)
        cause = "hardware" if lost and blame.cause == "killed" else blame.cause
        step = int(self._line(rank or 0)["step"])
        repeated = self.same[2] + 1 if self.same[:2] == (cause, step) else 0
        self.same = (cause, step, repeated)
        beat = int(self._line(rank or 0)["beat_ns"]) / 1e9 or self.started
        since = findings[0].since if findings else time.time() - (time.monotonic() - beat)
        incident = Incident(
            cause=cause,
            why=f"node {node} is gone" if lost else blame.why,
            rank=rank,
            node=node,
            node_lost=lost,
            same_step=repeated,
        )
        return incident, since

    def _node_lost(self, node: int | None) -> bool:
        """A rank that reports a lost connection lives, and so does its node."""
        here = [rank for rank in self.ranks if rank.node == node]
        return node is not None and self._memory_gone(node) and all(r.word == "gone" for r in here)

    def _memory_gone(self, node: int) -> bool:
        memory = self._memory(node)
        return memory in self.reaped or (memory[0] > 0 and is_ending(memory[0]))

    def _record(
        self,
        what: str,
        cause: Any,
        rank: int | None,
        node: int | None,
        why: str,
        rung: str,
        since: float,
    ) -> None:
        """For the ledger, which rank 0 of the next life goes on with."""
        at = time.time()
        write_found(
            self.config.folder,
            WatchFinding(
                at=at,
                since=min(since, at),
                what=what,
                cause=cause,
                rank=-1 if rank is None else rank,
                node="" if node is None else node_name(node),
                host="",
                why=why,
                rung=rung,
                step=max((int(self._line(n)["step"]) for n in range(len(self.ranks))), default=0),
            ),
        )

    # -- growing back ----------------------------------------------------------------------------------

    def _grow_if_possible(self) -> None:
        """A node that was lost is used again; the ranks pause after a copy in memory, and nothing is lost."""
        board = self.boards[self.nodes.used[0]]
        whole_again = self.config.parallel.world() == self.asked.parallel.world()
        line = self._line(0)
        young = not self.trained or line["step"] <= line["resumed"]
        if whole_again or young or board.paused() or board.stopping() or self.stopping.is_set():
            return
        back = self.nodes.lost_before(time.monotonic() - self.settings.rejoin_s)
        response = grown(self.nodes.survivors(), back, self.fits)
        if response is None or response.layout is None:
            return
        self.nodes.take_back(back, response.nodes)
        self.config = msgspec.structs.replace(self.asked, parallel=response.layout)
        self.log_line(f"{response.why}; the ranks pause after this step")
        for one in self.boards:
            one.order(PAUSE)

    # -- what others see, and the end ------------------------------------------------------------------

    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self.ranks if rank.process.exitcode is None]

    def _write_status(self) -> None:
        lines = [self._line(rank) for rank in range(len(self.ranks))]
        ranks = [
            RankStatus(
                number,
                int(line["pid"]),
                rank.node,
                PHASES[int(line["phase"])],
                int(line["step"]),
                int(line["address"]),
                int(line["bytes"]),
            )
            for number, (rank, line) in enumerate(zip(self.ranks, lines, strict=True))
        ]
        status = Status(
            life=self.life,
            layout=self.config.parallel,
            nodes=self.nodes.used,
            strikes=self.nodes.strikes,
            failures=self.nodes.failures,
            cordoned=self.nodes.cordoned,
            driver=os.getpid(),
            ranks=ranks,
            memories={n: int(board.nodes["pid"][0]) for n, board in enumerate(self.boards)},
            doubled=min((int(line["replicated"]) for line in lines), default=-1),
        )
        write_status(self.config.folder, status)

    def _close_ledger(self, *events: Any) -> None:
        """What rank 0 cannot write any more."""
        go_on = self.life > 0 or self.trained
        journal = Journal(self.config.folder, go_on=go_on, clock=time.time, log_line=self.log_line)
        for event in events:
            journal.note(event)
        journal.close()

    def end(self) -> None:
        end_ranks(self.ranks)
        for node, home in enumerate(self.homes):
            if (memory := self._memory(node)) not in self.reaped:
                end_process(memory[0])
            shutil.rmtree(home.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._write_status()
        adopt_orphans(False)


def _who(incident: Incident) -> str:
    if incident.rank is None:
        return "the run"
    return f"rank {incident.rank} on node {incident.node}"


def _as_error(incident: Incident, response: Response, failures: list[Failure]) -> CairnError:
    if response.rung == "requeue":
        return Requeue(
            f"{response.why} ({incident.cause}: {incident.why})",
            hint="submit it again with the same --out: it goes on from the newest checkpoint",
        )
    if failures:
        return first_failure(failures)
    return RankFailed(
        f"rank {incident.rank}: {incident.why}; {response.why}",
        hint="run it again with the same --out: it goes on from the newest complete checkpoint",
    )
