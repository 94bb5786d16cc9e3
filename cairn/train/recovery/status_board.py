"""Status board of a run with recovery: one page of shared memory.

    rank 0   pid  epoch  phase  beat  step  collectives  busy  copied  replicated  settled | when each step ended
    rank 1   ...
    node 0   agent's pid, when it began

Each rank writes its own line and no other; the driver reads all of them, ten times a second, without asking
anybody. The memory has no name: it is inherited by fork and goes with the last process; where ranks are started one by
one (`launched`), each node has its own, in a file. Knows no policy.
"""

import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

STARTING, RESTORING, TRAINING, DONE, PAUSED = range(1, 6)
PHASES = {
    0: "not started",
    STARTING: "starting",
    RESTORING: "restoring",
    TRAINING: "training",
    DONE: "done",
    PAUSED: "paused",
}
GO_ON, PAUSE, STOP = 0, 1, 2
RING = 4096  # steps whose end is remembered

RANK = np.dtype(
    [
        ("pid", "i8"),
        ("epoch", "i8"),
        ("phase", "i8"),
        ("beat_ns", "i8"),  # last sign of life; CLOCK_MONOTONIC is the same in every process
        ("step", "i8"),  # updates done
        ("collectives", "i8"),  # begun, in all groups
        ("measured", "i8"),  # the last step of which is known how long the rank computed
        ("trained_ns", "i8"),  # when this life began to train
        ("resumed", "i8"),  # the step from which it really went on
        ("copied", "i8"),  # step of the newest copy in this node's memory
        ("replicated", "i8"),  # step of the newest copy in another node's memory
        (
            "settled",
            "i8",
        ),  # step of the newest copy that was sent on, or that no other node would take
        ("skipped", "i8"),  # copies left out because the one before was not safe yet
        ("blocked_ns", "i8"),  # in this life, spent waiting for checkpoints
        ("saved", "i8"),  # checkpoints on disk, in all lives
        ("saving_ns", "i8"),  # that training waited for them
        ("restore_ns", "i8"),  # how long this life took to read its state
        ("address", "i8"),  # of a large tensor of the state, for fault injection
        ("bytes", "i8"),
    ]
)
NODE = np.dtype(
    [
        ("pid", "i8"),
        ("began_ns", "i8"),
        ("replicated_bytes", "i8"),
        ("alone", "i8"),  # copies that no other node took
    ]
)
HEAD = np.dtype(
    [
        ("order", "i8"),
        ("epoch", "i8"),
        ("dragged_ns", "i8"),  # by which slow ranks made steps longer, since the run began
        ("findings", "i8"),  # how many the watcher of all nodes has written down (`findings`)
    ]
)


class Board:
    """Made before the first fork; or a file, where the processes of a node have no common parent."""

    def __init__(self, ranks: int, nodes: int, file: Path | None = None) -> None:
        rings = ranks * RING * 8
        sizes = (HEAD.itemsize, ranks * RANK.itemsize, nodes * NODE.itemsize, rings, rings)
        self.memory = mmap.mmap(-1, sum(sizes)) if file is None else _mapped(file, sum(sizes))
        whole: Any = memoryview(self.memory)
        self.head: Any = np.frombuffer(whole, HEAD, 1, 0)
        self.ranks: Any = np.frombuffer(whole, RANK, ranks, sizes[0])
        self.nodes: Any = np.frombuffer(whole, NODE, nodes, sizes[0] + sizes[1])
        # Apart from the lines, so that a reader of these reads a few pages.
        both: Any = np.frombuffer(whole, "i8", 2 * ranks * RING, sum(sizes[:3]))
        ended, busy = both.reshape(2, ranks, RING)
        self.ended_ns: Any = ended  # when step n of a rank ended, at n % RING
        self.busy_of_ns: Any = busy  # how long the rank computed in it

    # -- the driver -------------------------------------------------------------------------------

    def order(self, what: int) -> None:
        self.head["order"][0] = what

    def committed(self, world: int) -> int:
        """The newest step of which every rank's copy is settled: the older ones may be overwritten."""
        return int(self.ranks["settled"][:world].min())

    def ends(self, rank: int, after: int) -> list[tuple[int, int]]:
        """(step, when it ended) of the steps after `after`, as far as they are remembered."""
        line = self.ranks[rank]
        done = int(line["step"])
        first = max(after + 1, done - RING + 1)
        return [(step, int(self.ended_ns[rank, step % RING])) for step in range(first, done + 1)]

    def spent(self, rank: int, after: int) -> list[tuple[int, float, float]]:
        """(step, seconds computed, seconds in all) of the steps after `after` of which both are known."""
        line = self.ranks[rank]
        done, resumed = min(int(line["step"]), int(line["measured"])), int(line["resumed"])
        first = max(after + 1, resumed + 2, done - RING + 2)
        steps = []
        for step in range(first, done + 1):
            whole_ns = self.ended_ns[rank, step % RING] - self.ended_ns[rank, (step - 1) % RING]
            steps.append((step, int(self.busy_of_ns[rank, step % RING]) / 1e9, int(whole_ns) / 1e9))
        return steps

    # -- a rank -----------------------------------------------------------------------------------

    def set(self, rank: int, **values: int) -> None:
        for name, value in values.items():
            self.ranks[name][rank] = value

    def beat(self, rank: int, collectives: int) -> None:
        line = self.ranks
        line["collectives"][rank] = collectives
        line["beat_ns"][rank] = time.monotonic_ns()

    def step_done(self, rank: int, step: int) -> None:
        now = time.monotonic_ns()
        self.ended_ns[rank, step % RING] = now
        self.ranks["step"][rank] = step
        self.ranks["beat_ns"][rank] = now

    def computed(self, rank: int, step: int, busy_ns: int) -> None:
        """Until the gradients had to wait for others; a GPU tells a step or two later."""
        self.busy_of_ns[rank, step % RING] = busy_ns
        self.ranks["measured"][rank] = step

    def forget_copies(self, rank: int) -> None:
        """No copy of this rank is anywhere."""
        self.set(rank, copied=-1, replicated=-1, settled=-1)

    def paused(self) -> bool:
        return int(self.head["order"][0]) == PAUSE

    def stopping(self) -> bool:
        return int(self.head["order"][0]) == STOP


def _mapped(file: Path, size: int) -> mmap.mmap:
    """Sparse: only the lines that are written take room."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
