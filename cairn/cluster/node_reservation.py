"""Interface for engines that only run processes: gang reservation of nodes, and a handle to each node's process.

    reserve -> start(reserved) -> Handle.poll, Handle.end -> release

`local` and `ray` fill this in. Knows nothing about jobs going wrong: `supervise` does.
"""

from pathlib import Path
from typing import Protocol

import msgspec

from cairn.cluster.resolve import JobPlan, NodeGroup

LOST = -1000  # what `poll` says of a node that has gone with everything on it


class ReservedNode(msgspec.Struct, frozen=True):
    """A place for one node of a group."""

    group: NodeGroup
    index: int  # among all nodes of the job
    name: str  # worker-0


class Handle(Protocol):
    """A node that runs an agent."""

    def poll(self) -> int | None:
        """Return None while the process runs, its exit status or negative signal, or LOST for a lost node."""
        ...

    def end(self, kill: bool = False) -> None: ...


class NodeReservation(Protocol):
    """An engine that holds processes."""

    address: str  # of this process, as nodes see it
    loopback: bool

    def reserve(self, plan: JobPlan) -> str | None:
        """Asks for all nodes at once; why they are not there yet, or None when they are."""
        ...

    def start(
        self, reserved: ReservedNode, argv: list[str], env: dict[str, str], log: Path
    ) -> Handle: ...

    def release(self) -> None:
        """Gives everything back; nothing of the job is left afterwards."""
        ...


class NodeState(msgspec.Struct, kw_only=True):
    """State of a reserved node."""

    reserved: ReservedNode
    handle: Handle | None = None
    again_at: float | None = None  # when its node is asked for again
    done: bool = False
    lost: int = 0
