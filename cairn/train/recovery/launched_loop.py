"""The training loop of a launched rank: it copies its state after each step, and agrees with all ranks on the copies.

A copy counts once all ranks have agreed that it is made; rank 0 warns where no second node has taken it. How the ranks
met, and from which step they go on, is decided before (`launched`).
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.peer_memory import PATIENCE_S
from cairn.train.checkpoint.peer_restore import forget
from cairn.train.loop import Outcome
from cairn.train.recovery import node_memory
from cairn.train.recovery.children import end_process, reap
from cairn.train.recovery.guarded_loop import GuardedLoop, RecallFailed
from cairn.train.recovery.launched_ledger import LaunchedLedger
from cairn.train.recovery.process_state import process_state
from cairn.train.recovery.status_board import Board

FOREVER = 2**62


class NodeBoard(Board):
    """The board of one node. What all nodes hold is only known once the ranks have agreed on it."""

    def __init__(self, node: node_memory.Node) -> None:
        super().__init__(node_memory.MOST_RANKS, 1, node.folder / node_memory.BOARD)
        self.agreed = -1  # the newest step of which every rank has a copy
        self.doubled = -1  # the newest step of which two nodes hold every rank's copy

    def committed(self, world: int) -> int:
        return self.agreed

    def forget_copies(self, rank: int) -> None:
        super().forget_copies(rank)
        self.agreed = self.doubled = -1


class LaunchedLoop(GuardedLoop):
    def __init__(
        self,
        *args: Any,
        leads: bool,
        ledger: LaunchedLedger | None,
        revive: Callable[[], None] | None,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self.leads, self.ledger, self.revive = leads, ledger, revive
        self.peers.patience_s = 0.0  # the waiting is done in `_agree`
        self.forgotten = False
        self.copies = self.single_copies = 0  # made; of those, held by one node only
        self.single = False  # the last one was
        self.handed_to = 0  # the process that was given the last copy

    def run(self) -> Outcome:
        outcome = super().run()
        if self.single_copies:
            self.log_line(
                f"note: {self.single_copies} of {self.copies} copies in memory were held by one node only"
            )
        if self.ledger is not None and not outcome.stopped_early:
            self.ledger.ended()
        return outcome

    def resume(self) -> bool:
        resumed = super().resume()
        if self.ledger is not None:
            self.ledger.trained(self.state.step)
        return resumed

    def _recall(self) -> bool:
        """If one rank cannot read a copy from memory, no rank goes on from it; the disk is next."""
        trouble, recalled = "", False
        try:
            recalled = super()._recall()
        except RecallFailed as error:
            trouble = str(error)
        if not super(GuardedLoop, self)._anybody(bool(trouble)):
            return recalled
        why = trouble or "another rank could not read its copy"
        self.log_line(f"warning: the copies in memory cannot be used ({why}); resuming from disk")
        forget(self.assignment.reach.addresses[0], FOREVER, -1, self.assignment.reach.secret)
        if not super(GuardedLoop, self)._anybody(bool(folders.complete_steps(self.root))):
            raise RecallFailed(why)
        return False

    def _history(self) -> tuple[int, float]:
        """By the ledger, which outlives the ranks; the seconds of this life are not counted twice."""
        if self.ledger is None:
            return super()._history()
        with self.ledger.lock:
            history = self.ledger.journal.ledger()
        life_s = (time.monotonic_ns() - int(self.board.ranks["trained_ns"][self.rank])) / 1e9
        return len(history.incidents), max(0.0, history.wall - life_s)

    def _one_step(self) -> None:
        super()._one_step()
        if self.ledger is not None:
            waited = int(self.board.ranks["blocked_ns"][self.rank]) / 1e9
            safe = self.board.committed(self.world)
            for news in self.ledger.stepped(self.state.step, waited, safe):
                self.log_line(news)

    def _copy(self) -> None:
        began = time.monotonic_ns()
        if self.revive is not None and self._memory_ended():
            self.log_line("warning: the memory of this node was ended; another one takes its place")
            self.revive()
        self._agree(0.0 if self.copy_soon else PATIENCE_S)
        self.board.ranks["blocked_ns"][self.rank] += time.monotonic_ns() - began
        self.handed_to = int(self.board.nodes["pid"][0])
        super()._copy()

    def _memory_ended(self) -> bool:
        """A memory that is stopped (a debugger, SIGSTOP) holds up every copy: after a while it is ended."""
        memory = int(self.board.nodes["pid"][0])
        deadline = time.monotonic() + self.settings.silent_s
        while process_state(memory) == "T":
            if time.monotonic() > deadline:
                end_process(memory)
            time.sleep(0.02)
        return reap(memory) or process_state(memory) in ("", "Z")

    def _rewind(self, what: str) -> None:
        """Steps that were taken back are done again, with other samples: no copy of them stays beside the new ones."""
        super()._rewind(what)
        self._await_settled(PATIENCE_S)
        super(GuardedLoop, self)._anybody(False)  # no copy is on its way to another node
        if self.leads:
            reach = self.assignment.reach
            forget(reach.addresses[0], self.assignment.generation, -1, reach.secret)
        self.board.forget_copies(self.rank)
        super(GuardedLoop, self)._anybody(
            False
        )  # no rank copies before all have dropped the old ones
        self.copy_soon = True

    def _await_settled(self, patience_s: float) -> None:
        """Until this rank's last copy is on another node, or was refused there."""
        line, rank = self.board.ranks, self.rank
        deadline = time.monotonic() + patience_s
        while line["settled"][rank] < line["copied"][rank] and time.monotonic() < deadline:
            memory = int(self.board.nodes["pid"][0])
            if memory != self.handed_to or process_state(memory) in ("", "Z"):
                break  # it was ended before it had sent the copy on, and its successor knows nothing of it
            time.sleep(0.002)

    def _agree(self, patience_s: float) -> None:
        """The newest step that memory holds, and that two nodes hold; all ranks learn it after the same step."""
        line, rank = self.board.ranks, self.rank
        self._await_settled(patience_s)
        steps = torch.tensor([int(line["settled"][rank]), int(line["replicated"][rank])])
        if self.control is not None:
            dist.all_reduce(steps, dist.ReduceOp.MIN, group=self.control)
        board: Any = self.board
        board.agreed, board.doubled = steps.tolist()
        self._report_copies(board)
        if board.agreed >= 0 and not self.forgotten and self.leads:
            reach = self.assignment.reach
            forget(reach.addresses[0], self.assignment.generation, FOREVER, reach.secret)
            self.forgotten = True  # what other layouts have left there is not needed any more

    def _report_copies(self, board: "NodeBoard") -> None:
        """Says when copies begin or cease to lie on one node only: then a lost node costs more than it should."""
        self.copies += 1
        alone = board.agreed > board.doubled
        self.single_copies += alone
        if alone and not self.single:
            kept = (
                f"step {board.doubled}" if board.doubled >= 0 else "the newest checkpoint on disk"
            )
            self.log_line(
                f"warning: only one node holds the copies of step {board.agreed}: no other node took them; "
                f"if that node is lost, the run goes back to {kept}"
            )
        if self.single and not alone and board.doubled >= 0:
            self.log_line(f"two nodes hold the copies again, of step {board.doubled}")
        self.single = alone
        if self.ledger is not None:
            self.ledger.copies(board.agreed, board.doubled)
