"""Detects that a wait will never end, and tells all ranks of the group why.

A rank that waits looks up every few milliseconds: has the peer died, was the group stopped,
is the time over? A rank that finds something stops the group: the reason goes into shared memory for its
own host and into the store for the others, whose sockets it then closes. So every rank raises, each
in its own operation, and all with the first reason. A stopped group stays stopped.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from cairn.labs.torch_backend.errors import CommTimeout, GroupStopped, RankLost
from cairn.labs.torch_backend.link import Link
from cairn.labs.torch_backend.rendezvous import STOP, Mesh
from cairn.labs.torch_backend.wire import OPERATION_NUMBERS, OPERATIONS, Call

LOOK_S = 0.02  # between two looks while asleep


class HangDetector:
    def __init__(
        self, mesh: Mesh, store: Any, stopping: Callable[[], object] = lambda: None
    ) -> None:
        """`stopping` is called once, while the operation that failed still is under way."""
        self._mesh, self._store, self._stopping = mesh, store, stopping
        self._place = mesh.local.index(mesh.rank)
        self._done = 0
        self.reason: str | None = None  # why the group is stopped

    @property
    def name(self) -> int:
        """This rank, as the world calls it."""
        return self._mesh.names[self._mesh.rank]

    def begin(self, call: Call) -> None:
        """Publish the operation to the other ranks of the host; a stopped group raises."""
        segment = self._mesh.segment
        if self.reason is None and segment is not None:
            self.reason = segment.stopped()
            if self.reason is not None:
                self._leave_word()
        if self.reason is not None:
            raise GroupStopped(f"{call.name} on rank {self.name}: {self.reason}")
        if segment is not None:
            number = OPERATION_NUMBERS[call.operation]
            segment.write_state(self._place, call.sequence, self._done, number)

    def end(self, call: Call) -> None:
        self._done = done = call.sequence
        if self._mesh.segment is not None:
            number = OPERATION_NUMBERS[call.operation]
            self._mesh.segment.write_state(self._place, done, done, number)

    def look(
        self, call: Call, peer: int, link: Link, since: float, timeout_s: float, receiving: bool
    ) -> None:
        """Raises when the wait for `peer` can not or should not go on.

        What a peer sent before it died or left can still be read: only then it is missed.
        """
        reason = self._mesh.segment.stopped() if self._mesh.segment is not None else None
        if reason is not None:
            raise GroupStopped(f"{call.name} on rank {self.name}: {reason}")
        lost = link.lost()
        name = self._mesh.names[peer]
        if lost is not None and not (receiving and peer in self._mesh.peers and link.ready()):
            reason = self._reason_in_store()
            if reason is not None:
                raise GroupStopped(f"{call.name} on rank {self.name}: {reason}")
            raise RankLost(
                f"{call.name}: rank {name} {lost}, rank {self.name} was waiting for it",
                hint="its own output says why; start all ranks again",
            )
        if time.monotonic() - since > timeout_s:
            raise CommTimeout(
                f"{call.name}: rank {self.name} waited {timeout_s:g} s for rank {name}{self._where(peer)}",
                hint="a rank that is slow, stuck or not in this operation; a larger timeout if it is only slow",
            )

    def stop(self, reason: str) -> None:
        """Tells all ranks, once; closes what others wait on."""
        if self.reason is not None:
            return
        self.reason = reason
        if self._mesh.segment is not None:
            self._mesh.segment.stop(reason)
        self._leave_word()
        with contextlib.suppress(Exception):  # the store may be what has died
            if not self._store.check([STOP]):
                self._store.set(STOP, reason)
        self._close_sockets()

    def leave(self) -> None:
        """This rank is done with the group; those that still wait for it may know."""
        if self._mesh.segment is not None:
            self._mesh.segment.write_state(self._place, 0, self._done, left=True)
        self._close_sockets()
        for peer in self._mesh.peers.values():
            peer.close()

    def _leave_word(self) -> None:
        with contextlib.suppress(Exception):  # what is left behind must not hide the reason
            self._stopping()

    def _close_sockets(self) -> None:
        for links in self._mesh.links:
            for peer, link in links.items():
                if peer not in self._mesh.peers:
                    link.close()

    def _where(self, peer: int) -> str:
        """The state of the peer as a clause for an error message; empty for a peer on another host."""
        if peer not in self._mesh.peers:
            return ""
        state = self._mesh.peers[peer].state()
        if state.entered == 0:
            return ", which has not begun any operation of the group"
        doing = f"{OPERATIONS[state.operation]} #{state.entered}"
        return f", which {'has done' if state.done == state.entered else 'is in'} {doing}"

    def _reason_in_store(self) -> str | None:
        with contextlib.suppress(Exception):  # the store may be what has died
            deadline = time.monotonic() + 0.5  # the reason is written before the sockets close
            while time.monotonic() < deadline:
                if self._store.check([STOP]):
                    return self._store.get(STOP).decode()
                time.sleep(LOOK_S)
        return None
