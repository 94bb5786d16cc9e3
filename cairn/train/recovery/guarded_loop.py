"""The training loop of a rank that is watched: the same steps, with a sign of life and a copy in memory now and then.

    step -> replicas agree? -> copy into memory -> (disk) -> step ...
      `--- board: step, when it ended, how long this rank computed

Adds nothing to what is computed. What is done when something fails is decided elsewhere (`ladder`).
"""

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cairn.core.checkpoint_interval import every_steps
from cairn.core.errors import CairnError, DataError
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.load import About, check_model
from cairn.train.checkpoint.peer_memory import PeerMemory
from cairn.train.checkpoint.peer_restore import Reach, Recall, recall_pieces
from cairn.train.checkpoint.piece import Piece
from cairn.train.loop import Loop
from cairn.train.recovery.checksum import Mark, complaint, mark_of
from cairn.train.recovery.object_store_copies import FarCopies
from cairn.train.recovery.stall_writer import StallWriter
from cairn.train.recovery.status_board import DONE, PAUSED, RESTORING, TRAINING, Board


class Paused(CairnError):
    """Asked to stop after a copy in memory: the run goes on in another layout."""


class RecallFailed(CairnError):
    """The state could not be read from memory, though it should be there."""


class Assignment(msgspec.Struct, frozen=True):
    """Start parameters of a rank."""

    rank: int
    world: int
    reach: Reach
    generation: int
    recall: Recall | None  # None: from disk, or from nothing
    failures: int = 0  # of this run, before this life
    seconds: float = 0.0  # of this run, before this life


class GuardedLoop(Loop):
    def __init__(self, *args: Any, board: Board, assignment: Assignment, **named: Any) -> None:
        super().__init__(*args, **named)
        self.board, self.assignment = board, assignment
        self.settings = self.config.recovery
        self.peers = PeerMemory(
            board,
            assignment.rank,
            assignment.world,
            assignment.reach,
            assignment.generation,
            log_line=self.log_line,
        )
        store = self.settings.object_store
        self.far = (
            FarCopies(
                store,
                self.settings.object_every,
                self.root,
                self.log_line,
                self.settings.object_keep,
            )
            if store and self.rank == 0
            else None
        )
        # After a failure some copies lie on one node only: the first step of the new life is copied at once.
        self.agents = self._agents() if assignment.recall is None else ()
        self.copy_soon = self.pausing = False
        self._publish_address()

    # -- the hooks of the loop ----------------------------------------------------------------------

    def resume(self) -> bool:
        self.board.set(self.rank, phase=RESTORING)
        began = time.monotonic_ns()
        try:
            if not self._recall():
                return self._from_disk()
            on_disk = torch.tensor(max(folders.complete_steps(self.root), default=-1))
            if (
                self.control is not None
            ):  # the same for all, whatever a network file system shows each
                dist.all_reduce(on_disk, dist.ReduceOp.MIN, group=self.control)
            self.saved = int(on_disk)
            return True
        finally:
            now = time.monotonic_ns()
            self.board.set(self.rank, resumed=self.state.step, restore_ns=now - began)
            # After it, for readers of steps.
            self.board.set(self.rank, measured=self.state.step, step=self.state.step)
            self.board.set(self.rank, phase=TRAINING, trained_ns=now)

    def _from_disk(self) -> bool:
        if self.far is not None:
            self.far.fetch_if_empty()
        if self.saver.group is not None:
            dist.barrier(self.saver.group)  # all see what rank 0 has fetched, however long it took
        return super().resume()

    def _recall(self) -> bool:
        recall = self.assignment.recall
        if recall is None:
            return False
        pieces = self.state.pieces()
        try:
            words = recall_pieces(recall, self.assignment.reach, self.rank, pieces)
        except (DataError, OSError) as error:
            raise RecallFailed(f"step {recall.step} in memory: {error}") from error
        about = msgspec.convert(words, About)
        check_model(about, self.state.spec, self.root)
        self.state.restore(about, pieces)
        self._restore_source(about)
        self.log_line(f"going on from memory at step {self.state.step}")
        return True

    def _one_step(self) -> None:
        super()._one_step()
        step, settings = self.state.step, self.settings
        self.board.step_done(self.rank, step)
        for computed, nanoseconds in self.state.parallel.compute_time.step_ended(step):
            self.board.computed(self.rank, computed, nanoseconds)
        if self.far is not None:
            self.far.look(self.saver.completed)
        if (self.copy_soon or step % settings.memory_every == 0) and step < self.config.steps:
            self._copy()
        elif settings.checksum_every and step % settings.checksum_every == 0:
            self._compare(self.state.pieces())

    def save(self) -> None:
        began = time.monotonic_ns()
        if self.state.step:
            self._compare(self.state.pieces())  # what is wrong must not get to the disk
        super().save()
        waited = time.monotonic_ns() - began
        self.board.ranks["blocked_ns"][self.rank] += waited
        self.board.ranks["saving_ns"][self.rank] += waited
        self.board.ranks["saved"][self.rank] += 1
        if self.settings.interval and self.config.checkpoint.every:
            self._choose_interval()

    def _choose_interval(self) -> None:
        """checkpoint.every by Young and Daly, from what rank 0 has measured; all ranks get it after the same save."""
        line, now = self.board.ranks[self.rank], time.monotonic_ns()
        steps = self.state.step - int(line["resumed"])
        every = before = self.config.checkpoint.every
        if self.rank == 0 and steps > 0:
            cost_s = int(line["saving_ns"]) / 1e9 / int(line["saved"])
            step_s = (now - int(line["trained_ns"]) - int(line["blocked_ns"])) / 1e9 / steps
            failures, seconds = self._history()
            life_s = (now - int(line["trained_ns"])) / 1e9
            best = every_steps(cost_s, step_s, failures, seconds + life_s)
            if abs(best - before) > before / 5:  # what is measured is never quite the same
                every = best
                self.log_line(
                    f"a checkpoint every {every} steps: it costs {cost_s:.3f} s, a step {step_s:.3f} s, "
                    f"{failures} failures so far"
                )
        if self.control is not None:
            agreed, group = torch.tensor(every), cast(Any, self.control)
            dist.broadcast(agreed, 0, group=group)
            every = int(agreed)
        saving = msgspec.structs.replace(self.config.checkpoint, every=every)
        self.config = msgspec.structs.replace(self.config, checkpoint=saving)

    def _history(self) -> tuple[int, float]:
        """Failures so far, and the seconds of the run before this life."""
        return self.assignment.failures, self.assignment.seconds

    def _anybody(self, here: bool) -> bool:
        """All stop after the same step; and all make a copy after the same step, where an agent is a new one."""
        pause = self.board.paused()
        stop = here or pause or self.board.stopping()
        flags = torch.tensor([float(stop), float(pause), float(self.agents != self._agents())])
        if self.control is not None:
            dist.all_reduce(flags, group=self.control)
        stop, self.pausing, self.copy_soon = (bool(answer) for answer in flags.tolist())
        return stop

    def _finish(self) -> None:
        if self.pausing and self.state.step < self.config.steps:
            self._copy()
            if super()._anybody(not self.peers.wait_until_safe(self.state.step)):
                super()._finish()  # then the disk has to carry it
            self.board.set(self.rank, phase=PAUSED)
            raise Paused(f"paused after step {self.state.step}")
        super()._finish()
        if self.far is not None:
            self.far.wait()
            self.far.look(last=True)
            self.far.wait()
        self.board.set(self.rank, phase=DONE)

    # -- what is added ------------------------------------------------------------------------------

    def _copy(self) -> None:
        began = time.monotonic_ns()
        self.agents = self._agents()
        self._read(0)  # the recent losses are part of the state
        about = self._about()
        pieces, inspect = self.state.pieces(), self._compare
        if (
            self.state.device.type == "cuda"
        ):  # the device reads its memory faster than the host the copy
            self._compare(pieces)
            inspect = _silent
        self.peers.save(self.state.step, pieces, about, inspect, hurry=self.copy_soon)
        self.board.ranks["blocked_ns"][self.rank] += time.monotonic_ns() - began

    def _compare(self, pieces: Mapping[str, Piece]) -> None:
        """All ranks call this after the same steps; one that holds other numbers than its replicas ends the epoch."""
        if self.world == 1:
            return
        mine = mark_of(pieces)
        gathered = torch.empty(self.world, 2, dtype=torch.int64)
        parts = list(gathered.unbind(0))
        dist.all_gather(parts, torch.tensor(mine, dtype=torch.int64), group=self.control)
        marks = [Mark(*part.tolist()) for part in parts]
        wrong = complaint(marks, self.state.step)
        if wrong is not None:
            raise wrong

    def _agents(self) -> tuple[int, ...]:
        """When each agent began: one that is new has lost what the one before it held."""
        return tuple(map(int, self.board.nodes["began_ns"]))

    def _publish_address(self) -> None:
        """Publish the address of the largest tensor, where a fault injector flips a bit."""
        pieces = [
            piece.tensor for name, piece in self.state.pieces().items() if name.startswith("model/")
        ]
        largest = max(pieces, key=lambda tensor: tensor.numel())
        size = largest.untyped_storage().nbytes()
        self.board.set(self.rank, address=largest.untyped_storage().data_ptr(), bytes=size)


def _silent(pieces: Mapping[str, Piece]) -> None:
    pass


class Heartbeat:
    """Signs of life from a thread of its own, with how many collectives this rank has begun."""

    def __init__(
        self, board: Board, rank: int, every_s: float, stall: StallWriter | None = None
    ) -> None:
        """`stall`: gets how far this rank is, and leaves a note where it stands still."""
        self.board, self.rank, self.every_s, self.stall = board, rank, every_s, stall
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join(5)
        if self.stall is not None:
            self.stall.clear()

    def _beat(self) -> None:
        while not self.stopped.is_set():
            begun = collectives_begun()
            self.board.beat(self.rank, begun)
            if self.stall is not None:
                self.stall.look(int(self.board.ranks["step"][self.rank]), begun)
            self.stopped.wait(self.every_s)


def collectives_begun() -> int:
    """Number of collectives this process has started in all groups; 0 if torch does not report it."""
    total = 0
    with contextlib.suppress(RuntimeError, AttributeError):
        groups: Any = list(distributed_c10d._world.pg_map)
        for group in groups:
            with contextlib.suppress(RuntimeError):
                total += group._get_sequence_number_for_group()
    return total
