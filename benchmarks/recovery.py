"""What survival costs: copies in memory, checkpoints on disk, and the way back from both, in one process run.

    python benchmarks/recovery.py [--parameters 20] [--ahead] [--out benchmarks/cpu/recovery.json]

    save      blocked seconds of a synchronous save, of one in the background, of a copy in memory
    restore   seconds from disk, from this node's memory, from another node's memory over TCP

A restore is what a rank of `cairn train` does, from the call to tensors that are filled and checked:

    disk      find the newest checkpoint, hold all its files against their checksums, read it (`folder`, `load`)
    this      be handed the agent's memory, copy it, hold every tensor against its checksum (`peer_recall`)
    mapped    the same from the agent of another node, where nodes are groups of processes on one machine
    another   connect, prove that one knows the job's secret, receive into the tensors, the same checksums

The disk is read twice: from the page cache, and after the cache was told to let go of the files, as on a machine that
has just been started; ratios are those of the second. "Another node" is another process of this machine, over loopback:
both ends share its cores, which two machines would not. The tensors are there already and their memory has been used,
as in a rank that has built its model. Ratios within one run mean something on a shared machine; seconds alone do not.
Where others want the cores, too, `--ahead` gives each single measurement, and the agents, real-time priority (which
takes the right to do so): tenths of a second, with pauses between them. The state is that of AdamW in float32, 12 bytes
for each parameter.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import torch

from cairn.bench.record import add_arguments, record
from cairn.core import events
from cairn.core.records import Span, read
from cairn.core.shared_secret import Secret
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.load import load_pieces
from cairn.train.checkpoint.peer_agent import Agent, Doors
from cairn.train.checkpoint.peer_memory import PeerMemory
from cairn.train.checkpoint.peer_placement import recovery_point
from cairn.train.checkpoint.peer_restore import Reach, ask_holdings, recall_pieces
from cairn.train.checkpoint.piece import Piece, whole
from cairn.train.checkpoint.save import Saver
from cairn.train.recovery.status_board import Board

# Of each the median; a ratio is that of two neighbours in one round, of those the median.
REPEATS = 7
PAUSE_S = 0.15  # for the others, after something that was done before them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=20, help="millions of them")
    parser.add_argument("--ahead", action="store_true", help="measure with real-time priority")
    add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), int(options.parameters * 1e6), Clock(options.ahead))
    before = {"processes that wanted a core before": busy, "with priority over them": options.ahead}
    record(before | found, options)


class Clock:
    """Seconds that something takes; `ahead`: before everybody else who wants a core."""

    def __init__(self, ahead: bool) -> None:
        self.ahead = ahead

    def hurry(self, on: bool) -> None:
        if self.ahead:
            kind, level = (os.SCHED_RR, 5) if on else (os.SCHED_OTHER, 0)
            os.sched_setscheduler(0, kind, os.sched_param(level))

    def timed(self, function: Callable[[], object]) -> float:
        self.hurry(True)
        began = time.perf_counter()
        function()
        took = time.perf_counter() - began
        self.hurry(False)
        time.sleep(PAUSE_S if self.ahead else 0.0)
        return took


def measure(folder: Path, parameters: int, clock: Clock) -> dict[str, float]:
    pieces = state(parameters)
    found: dict[str, float] = {"state, MB": sum(p.tensor.nbytes for p in pieces.values()) / 1e6}
    found |= saves(folder, pieces, clock)
    found |= restores(folder, pieces, clock)
    found["background save / synchronous save, blocked"] = (
        found["background save, blocked s"] / found["synchronous save, s"]
    )
    return found


def state(parameters: int) -> dict[str, Piece]:
    """Matrices of 1M numbers and two moments of each."""
    count = max(1, parameters // (1 << 20))
    roles = ("model", "optim/first", "optim/second")
    return {f"{role}/{n}": whole(torch.randn(1024, 1024)) for role in roles for n in range(count)}


def saves(folder: Path, pieces: dict[str, Piece], clock: Clock) -> dict[str, float]:
    plain = Saver(folder / "sync", keep=1, in_background=False)
    beside = Saver(folder / "async", keep=2, in_background=True)
    sync, blocked = [], []
    for step in range(REPEATS + 1):
        sync.append(clock.timed(lambda step=step: plain.save(step, pieces, {})))
        blocked.append(clock.timed(lambda step=step: beside.save(step, pieces, {})))
        beside.wait()
    return {
        "synchronous save, s": median(sync[1:]),
        "background save, blocked s": median(blocked[1:]),
    }


def restores(folder: Path, pieces: dict[str, Piece], clock: Clock) -> dict[str, float]:
    board, secret = Board(1, 2), Secret.fresh()
    doors = [Doors.open(str(folder / f"n{node}")) for node in range(2)]
    addresses = tuple(door.address for door in doors)
    agents = [
        multiprocessing.get_context("fork").Process(
            target=Agent(node, doors[node], addresses[1 - node], board, secret).run, daemon=True
        )
        for node in range(2)
    ]
    clock.hurry(True)
    for agent in agents:
        agent.start()
    clock.hurry(False)
    try:
        paths = tuple(door.path for door in doors)
        reach = Reach(0, paths[0], addresses, secret)
        return _restores(folder, pieces, board, reach, paths, clock)
    finally:
        for agent in agents:
            agent.kill()
            agent.join()


def _restores(
    folder: Path,
    pieces: dict[str, Piece],
    board: Board,
    reach: Reach,
    paths: tuple[str, ...],
    clock: Clock,
) -> dict[str, float]:
    peer = PeerMemory(board, 0, 1, reach, 1)
    blocked, safe = [], []

    def copy(step: int) -> None:
        began = time.perf_counter()
        peer.save(step, pieces, {})
        blocked.append(time.perf_counter() - began)
        assert peer.wait_until_safe(step)

    for step in range(1, REPEATS + 2):
        safe.append(clock.timed(lambda step=step: copy(step)) - blocked[-1])
    holdings = {n: ask_holdings(address, reach.secret) for n, address in enumerate(reach.addresses)}
    point = recovery_point(holdings, 1, 1)
    assert point is not None
    far = type(point)(
        point.step, point.generation, (type(point.copies[0])(0, (1,), point.copies[0].check),)
    )
    room = {name: p._replace(tensor=torch.ones_like(p.tensor)) for name, p in pieces.items()}
    beside = msgspec.structs.replace(reach, paths=paths)
    disk, cold, here, mapped, there = [], [], [], [], []
    for _ in range(REPEATS):  # one beside the other, so that a busy neighbour slows all of them
        disk.append(clock.timed(lambda: from_disk(folder / "async", room)))
        let_go(folder / "async")
        cold.append(clock.timed(lambda: from_disk(folder / "async", room)))
        for times, which, way in ((here, point, reach), (mapped, far, beside), (there, far, reach)):
            emptied(room)
            times.append(
                clock.timed(lambda which=which, way=way: recall_pieces(which, way, 0, room))
            )
            assert all(torch.equal(room[name].tensor, p.tensor) for name, p in pieces.items())
    parts = parts_of(folder, lambda: recall_pieces(far, reach, 0, room), clock)
    peer.close()
    return {
        "copy in memory, blocked s": median(blocked[2:]),
        "copy safe on the other node after, s": median(safe[2:]),
        "restore from disk, s": median(cold),
        "restore from the disk's cache, s": median(disk),
        "restore from this node's memory, s": median(here),
        "restore from another node's memory on this machine, s": median(mapped),
        "restore from another node's memory, s": median(there),
        "disk restore / restore from this node's memory": _times(cold, here),
        "disk restore / restore from another node on this machine": _times(cold, mapped),
        "disk restore / restore from another node": _times(cold, there),
        "disk restore / restore from another node, best of each": min(cold) / min(there),
        "restore from the disk's cache / restore from another node": _times(disk, there),
        **{f"from another node, of which {part} s": seconds for part, seconds in parts.items()},
    }


def emptied(room: dict[str, Piece]) -> None:
    """What was there before must not pass for what is read; a few numbers, not to warm the cache."""
    for piece in room.values():
        piece.tensor[0, :8] = -1.0


def parts_of(folder: Path, restore: Callable[[], object], clock: Clock) -> dict[str, float]:
    """Where the time of a restore goes; of three the quickest, which nobody has interrupted."""
    tries = [_parts(folder / f"events-{n}.jsonl", restore, clock) for n in range(3)]
    return min(tries, key=lambda parts: parts["the whole"])


def _parts(home: Path, restore: Callable[[], object], clock: Clock) -> dict[str, float]:
    """By the spans that a restore writes; of lanes side by side the longest."""
    path = events.listen(home)
    whole_s = clock.timed(restore)
    events.close()
    spans = [record for record in read(path) if isinstance(record, Span)]
    longest = {
        name: max(span.duration_ns for span in spans if span.name == f"copy {name}") / 1e9
        for name in ("opened", "received", "summed")
    }
    return longest | {"the whole": whole_s}


def _times(slow: list[float], fast: list[float]) -> float:
    return median([one / other for one, other in zip(slow, fast, strict=True)])


def from_disk(root: Path, room: dict[str, Piece]) -> None:
    """As a run does it: the newest checkpoint, its checksums, then its tensors."""
    found = folders.newest(root, [])
    assert found is not None
    load_pieces(found, room, together=False)


def let_go(root: Path) -> None:
    """Out of the page cache; what is on disk already can be dropped by anybody."""
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
