"""A rank's side of checkpoints in memory: its state is copied to its node's agent, who sends it on.

    state --copy--> this node's memory ....agent....> another node's memory          the step waits for the copy only

Of each rank two copies are kept. The older one is overwritten only when the newer one is safe on two nodes for every
rank, so there is always a step that all ranks can go back to. A newer one that does not become safe makes room itself.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cairn.core.events import span
from cairn.core.units import format_bytes
from cairn.train.checkpoint.peer_link import Link, connect_local
from cairn.train.checkpoint.peer_messages import Done, Reserve, Room, Written
from cairn.train.checkpoint.peer_pack import (
    Entry,
    Table,
    clear_gaps,
    cuts_of,
    entries_of,
    room_for,
    tensor_at,
    write_table,
)
from cairn.train.checkpoint.peer_restore import Reach
from cairn.train.checkpoint.peer_shard import mark
from cairn.train.checkpoint.piece import Piece
from cairn.train.recovery.status_board import Board

Inspect = Callable[[Mapping[str, Piece]], None]
PATIENCE_S = 10.0  # for the copy before to become safe
ANSWER_S = 30.0


class Home:
    """Memory of this rank's two copies, shared with the agent."""

    def __init__(self, size: int, descriptor: int) -> None:
        self.size = size
        self.memory = mmap.mmap(descriptor, 2 * size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(descriptor)
        self.tensors: list[dict[str, Tensor]] = [{}, {}]
        self._unpin: Callable[[], Any] | None = None

    def pin(self, cuda: Any) -> str | None:
        """Register the mapping with CUDA, once: a GPU then copies into it at the speed of the bus, asynchronously.

        `cuda`: `torch.cuda.cudart()`. The result says why it cannot be pinned; None: it is.
        """
        address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        error = cuda.cudaHostRegister(address, len(self.memory), 0)
        if error != cuda.cudaError.success:
            _forget_cuda_error()
            return f"the driver does not pin {format_bytes(len(self.memory))}: {error}"
        self._unpin = lambda: cuda.cudaHostUnregister(address)
        return None

    def close(self) -> None:
        """Unregister the memory before it is unmapped; a longer registration would pin its pages."""
        unpin, self._unpin = self._unpin, None
        if unpin is not None and int(unpin()):
            _forget_cuda_error()

    def slot(self, number: int) -> memoryview:
        return memoryview(self.memory)[number * self.size : (number + 1) * self.size]

    def step(self, number: int) -> int:
        return int.from_bytes(self.slot(number)[:8], "little", signed=True)


def _forget_cuda_error() -> None:
    """CUDA reports an error that was answered already once more, to the next launch that asks for the last one."""
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.ones(1, device="cuda")


class PeerMemory:
    def __init__(
        self,
        board: Board,
        rank: int,
        world: int,
        reach: Reach,
        generation: int,
        patience_s: float = PATIENCE_S,
        log_line: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.node, self.patience_s = reach.node, patience_s
        self.board, self.rank, self.world, self.log_line = board, rank, world, log_line
        self.agent, self.generation = reach.path, generation
        self.agent_began = -1  # of the agent that has our memory
        self.link: Link | None = None
        self.home: Home | None = None
        self.entries: list[Entry] = []
        self.data = 0

    # -- into memory ------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        pieces: Mapping[str, Piece],
        about: Mapping[str, Any],
        inspect: Inspect = lambda pieces: None,
        hurry: bool = False,
    ) -> bool:
        """Save a copy; returns False if the agent is not running.

        `hurry`: do not wait for the copy before: an agent was lost, and it may never become safe.
        `inspect` sees what was copied before it counts, or the state itself where nothing was; it refuses by raising.
        """
        with span("memory checkpoint", step=step):
            written = self._written(step, pieces, about, inspect, hurry)
            if written is None:
                return self._left_out()
            if self._announce(written):
                return True
            self.close()  # the agent died: once more, to its successor
            again = self._written(step, pieces, about, lambda pieces: None, True)
            return (again is not None and self._announce(again)) or self._left_out()

    def _written(
        self,
        step: int,
        pieces: Mapping[str, Piece],
        about: Mapping[str, Any],
        inspect: Inspect,
        hurry: bool,
    ) -> Written | None:
        """The copy lies in the memory that the agent sees; None: there is none."""
        home = self._home(pieces, about)
        if home is None:
            inspect(pieces)
            return None
        slot = self._free(home, hurry)
        used = self._copy(home, slot, pieces, about)
        homes = home.tensors[slot]
        inspect({name: piece._replace(tensor=homes[name]) for name, piece in pieces.items()})
        mark(home.memory, slot, home.size, step)
        return Written(
            self.generation, self.rank, step, slot, used, cuts_of(self.entries, self.data)
        )

    def wait_until_safe(self, step: int, patience_s: float = ANSWER_S) -> bool:
        """Wait until every rank's copy of `step` is on two nodes or was refused by the second one; returns success."""
        deadline = time.monotonic() + patience_s
        while self.board.committed(self.world) < step:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def _copy(
        self, home: Home, slot: int, pieces: Mapping[str, Piece], about: Mapping[str, Any]
    ) -> int:
        mark(home.memory, slot, home.size, -1)
        write_table(home.slot(slot), Table(self.entries, dict(about), self.data))
        homes = home.tensors[slot]
        if not homes:
            memory = home.slot(slot)
            clear_gaps(memory, self.entries, self.data)
            homes.update({e.name: tensor_at(memory, e, self.data) for e in self.entries})
        for name, piece in pieces.items():
            homes[name].copy_(piece.tensor.detach(), non_blocking=True)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        last = self.entries[-1]
        return self.data + last.at + last.size()

    def _free(self, home: Home, hurry: bool) -> int:
        """The older copy's place if the newer one is safe; otherwise the newer one's, which cannot be gone back to."""
        older = 0 if home.step(0) <= home.step(1) else 1
        newer = home.step(1 - older)
        safe = newer < 0 or self.wait_until_safe(newer, 0.0 if hurry else self.patience_s)
        return older if safe else 1 - older

    def _announce(self, written: Written) -> bool:
        try:
            answer = self._linked().ask(written)
        except OSError:
            return False
        if not isinstance(answer, Done) or not answer.fine:
            return False
        self.board.set(self.rank, copied=written.step)
        return True

    def _left_out(self) -> bool:
        self.board.ranks["skipped"][self.rank] += 1
        return False

    def _home(self, pieces: Mapping[str, Piece], about: Mapping[str, Any]) -> Home | None:
        began = int(self.board.nodes["began_ns"][self.node])
        if began != self.agent_began:
            self.close()  # another agent, which has nothing of ours
            self.agent_began = began
        if self.home is None:
            self.entries = entries_of(pieces)
            self.data, size = room_for(self.entries, about)
            try:
                link = self._linked()
                room = link.ask(Reserve(self.generation, self.rank, size, self.world))
                descriptor = link.receive_descriptor() if isinstance(room, Room) else -1
            except OSError:
                self.close()
                return None
            if not isinstance(room, Room):
                return None
            self.home = Home(room.size, descriptor)
            if any(piece.tensor.is_cuda for piece in pieces.values()):
                reason = self.home.pin(torch.cuda.cudart())
                if reason is not None:
                    self.log_line(
                        f"warning: copies in memory are slower than they could be: {reason}"
                    )
        return self.home

    def _linked(self) -> Link:
        if self.link is None:
            self.link = connect_local(self.agent, ANSWER_S)
        return self.link

    def close(self) -> None:
        """Lets go of the agent; the next copy looks for it again."""
        if self.link is not None:
            self.link.close()
        if self.home is not None:
            self.home.close()
        self.link = self.home = None
