"""What survival costs: copies in memory, checkpoints on disk, and the way back from both, in one process run.

    python benchmarks/recovery.py [--parameters 20] [--out benchmarks/cpu/recovery.json]

    save      blocked seconds of a synchronous save, of one in the background, of a copy in memory
    restore   seconds from disk, from this node's memory, from another node's memory over TCP

Ratios within one run mean something on a shared machine; seconds alone do not. The state is that of AdamW in float32,
12 bytes for each parameter. The disk is read twice: from the page cache, and after the cache was told to let go of the
files, as on a machine that has just been started.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from record import add_arguments, record

from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.load import load_pieces
from cairn.train.checkpoint.peer_agent import Agent, Doors
from cairn.train.checkpoint.peer_memory import PeerMemory
from cairn.train.checkpoint.peer_placement import recovery_point
from cairn.train.checkpoint.peer_recall import Reach, ask_holdings, recall_pieces
from cairn.train.checkpoint.piece import Piece, whole
from cairn.train.checkpoint.save import Saver
from cairn.train.recovery.board import Board

REPEATS = (
    7  # of each the median; a ratio is that of two neighbours in one round, and of those the median
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=20, help="millions of them")
    add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), int(options.parameters * 1e6))
    record({"processes that wanted a core before": busy, **found}, options)


def measure(folder: Path, parameters: int) -> dict[str, float]:
    pieces = state(parameters)
    found: dict[str, float] = {"state, MB": sum(p.tensor.nbytes for p in pieces.values()) / 1e6}
    found |= saves(folder, pieces)
    found |= restores(folder, pieces)
    found["background save / synchronous save, blocked"] = (
        found["background save, blocked s"] / found["synchronous save, s"]
    )
    return found


def state(parameters: int) -> dict[str, Piece]:
    """Matrices of 1M numbers and two moments of each."""
    count = max(1, parameters // (1 << 20))
    roles = ("model", "optim/first", "optim/second")
    return {f"{role}/{n}": whole(torch.randn(1024, 1024)) for role in roles for n in range(count)}


def saves(folder: Path, pieces: dict[str, Piece]) -> dict[str, float]:
    plain = Saver(folder / "sync", keep=1, in_background=False)
    beside = Saver(folder / "async", keep=2, in_background=True)
    sync, blocked = [], []
    for step in range(REPEATS + 1):
        sync.append(timed(lambda step=step: plain.save(step, pieces, {})))
        blocked.append(timed(lambda step=step: beside.save(step, pieces, {})))
        beside.wait()
    return {
        "synchronous save, s": median(sync[1:]),
        "background save, blocked s": median(blocked[1:]),
    }


def restores(folder: Path, pieces: dict[str, Piece]) -> dict[str, float]:
    board = Board(1, 2)
    doors = [Doors.open(str(folder / f"n{node}")) for node in range(2)]
    addresses = tuple(door.address for door in doors)
    agents = [
        multiprocessing.get_context("fork").Process(
            target=Agent(node, doors[node], addresses[1 - node], board).run, daemon=True
        )
        for node in range(2)
    ]
    for agent in agents:
        agent.start()
    try:
        return _restores(folder, pieces, board, doors, addresses)
    finally:
        for agent in agents:
            agent.kill()
            agent.join()


def _restores(
    folder: Path,
    pieces: dict[str, Piece],
    board: Board,
    doors: list[Doors],
    addresses: tuple[str, ...],
) -> dict[str, float]:
    peer = PeerMemory(board, 0, 1, Reach(0, doors[0].path, addresses), 1)
    blocked, safe = [], []
    for step in range(1, REPEATS + 2):
        blocked.append(timed(lambda step=step: peer.save(step, pieces, {})))
        safe.append(timed(lambda step=step: peer.wait_until_safe(step)))
    point = recovery_point(
        {node: ask_holdings(address) for node, address in enumerate(addresses)}, 1, 1
    )
    assert point is not None
    far = type(point)(
        point.step, point.generation, (type(point.copies[0])(0, (1,), point.copies[0].check),)
    )
    room = {name: p._replace(tensor=torch.zeros_like(p.tensor)) for name, p in pieces.items()}
    disk, cold, here, there = [], [], [], []
    for _ in range(REPEATS):  # one beside the other, so that a busy neighbour slows all of them
        disk.append(timed(lambda: from_disk(folder / "async", room)))
        let_go(folder / "async")
        cold.append(timed(lambda: from_disk(folder / "async", room)))
        here.append(
            timed(lambda: recall_pieces(point, Reach(0, doors[0].path, addresses), 0, room))
        )
        there.append(timed(lambda: recall_pieces(far, Reach(0, doors[0].path, addresses), 0, room)))
    assert all(torch.equal(room[name].tensor, p.tensor) for name, p in pieces.items())
    peer.close()
    return {
        "copy in memory, blocked s": median(blocked[2:]),
        "copy safe on the other node after, s": median(safe[2:]),
        "restore from disk, s": median(cold),
        "restore from the disk's cache, s": median(disk),
        "restore from this node's memory, s": median(here),
        "restore from another node's memory, s": median(there),
        "disk restore / restore from this node's memory": _times(cold, here),
        "disk restore / restore from another node": _times(cold, there),
        "disk restore / restore from another node, best of each": min(cold) / min(there),
    }


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


def timed(function: object) -> float:
    began = time.perf_counter()
    function()  # type: ignore[operator]
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
