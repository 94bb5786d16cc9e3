"""A node dies. Is its state on disk, minutes away, or in a neighbour's memory?

    every few steps   state --copy--> own memory --send--> the keeper's memory      keeper: in another failure domain
    node lost         the new one reads it from the keeper                          only if both are lost: the disk

How likely both are lost is a formula, held against draws; how fast the two ways are is measured with the trainer's own
pieces: saver and loader on disk, the packed form in shared memory.
"""

import mmap
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.train.checkpoint.piece import Piece

NODES = 16


class Ways(NamedTuple):
    """One way to put a state somewhere and to get it back."""

    put_s: float
    got_s: float
    unchanged: int  # tensors that came back as they were
    tensors: int


def drawn_survival(keeper: list[int | None], lost: int, times: int, draw: random.Random) -> float:
    """Share of draws in which every node's state is still somewhere, with these keepers."""
    fine = 0
    for _ in range(times):
        lost_nodes = set(draw.sample(range(len(keeper)), lost))
        fine += all(keeper[node] not in lost_nodes for node in lost_nodes)
    return fine / times


def made(megabytes: int) -> "dict[str, Piece]":
    import torch

    from cairn.train.checkpoint.piece import whole

    count = megabytes * 1024 * 1024 // 4 // 8
    return {f"tensor {i}": whole(torch.randn(count)) for i in range(8)}


def through_memory(pieces: "dict[str, Piece]", memory: mmap.mmap) -> tuple[float, float]:
    """Seconds to copy the state into memory that a neighbour could read, and back."""
    from cairn.train.checkpoint.peer_pack import Table, entries_of, room_for, tensor_at, write_table

    entries = entries_of(pieces)
    data, _ = room_for(entries, {})
    began = time.perf_counter()
    write_table(memoryview(memory), Table(entries, {}, data))
    for entry in entries:
        tensor_at(memory, entry, data).copy_(pieces[entry.name].tensor)
    written = time.perf_counter()
    _forget(pieces)
    read = time.perf_counter()
    for entry in entries:
        pieces[entry.name].tensor.copy_(tensor_at(memory, entry, data))
    return written - began, time.perf_counter() - read


def run(bench: Workbench) -> Outcome:
    from cairn.train.checkpoint.peer_placement import keepers, survives

    keeper = keepers([node // 4 for node in range(NODES)])  # racks of four
    inside = sum(other is None or other // 4 == node // 4 for node, other in enumerate(keeper))
    draw, times = random.Random(0), bench.pick(20_000, 4_000)
    formula, sampled = [], []
    for lost in range(1, 7):
        bench.step(f"{lost} of {NODES} nodes lost")
        formula.append((float(lost), survives(NODES, 2, lost)))
        sampled.append((float(lost), drawn_survival(keeper, lost, times, draw)))
    megabytes = bench.setting("megabytes", bench.pick(128, 32))
    memory, disk = restored(bench, megabytes)
    return Outcome(
        checks=[*_placed(inside, dict(formula)[2.0], dict(sampled)[2.0]), *_restored(memory, disk)],
        plots=[
            Plot(
                title=Words("Everything survives", "状态完整的概率"),
                x=Words("nodes lost at once", "同时丢失的节点数"),
                y=Words("chance", "概率"),
                lines={"formula": formula, "drawn": sampled},
            )
        ],
        table=_table(megabytes / 1024, {"memory": memory, "disk": disk}),
    )


def restored(bench: Workbench, megabytes: int) -> tuple[Ways, Ways]:
    """The same state into memory and back, the best of five; then to the disk and back."""
    import torch

    from cairn.train.checkpoint.peer_pack import entries_of, room_for

    pieces = made(megabytes)
    before = {name: piece.tensor.clone() for name, piece in pieces.items()}

    def unchanged() -> int:
        return sum(torch.equal(pieces[name].tensor, value) for name, value in before.items())

    bench.step(f"{megabytes} MiB through memory")
    memory = mmap.mmap(-1, room_for(entries_of(pieces), {})[1])
    runs = [through_memory(pieces, memory) for _ in range(5)]
    in_memory = Ways(
        min(one[0] for one in runs), min(one[1] for one in runs), unchanged(), len(before)
    )
    bench.step(f"{megabytes} MiB through the disk")
    put, loaded_s = through_disk(pieces, bench.folder)
    return in_memory, Ways(put, loaded_s, unchanged(), len(before))


def through_disk(pieces: "dict[str, Piece]", folder: Path) -> tuple[float, float]:
    """Seconds to save the state with the trainer's saver, and to load it."""
    from cairn.train.checkpoint.folder import folder_of
    from cairn.train.checkpoint.load import load_pieces
    from cairn.train.checkpoint.save import Saver

    began = time.perf_counter()
    Saver(folder, keep=1, in_background=False).save(1, pieces, {"step": 1})
    written = time.perf_counter()
    _forget(pieces)
    read = time.perf_counter()
    load_pieces(folder_of(folder, 1), pieces, together=False)
    return written - began, time.perf_counter() - read


def _forget(pieces: "dict[str, Piece]") -> None:
    """So that what comes back comes from where it was kept."""
    for piece in pieces.values():
        piece.tensor.zero_()


def _placed(inside: int, formula: float, sampled: float) -> list[Check]:
    return [
        Check(
            what=Words("nodes whose copy lies in their own rack", "副本落在同机架的节点数"),
            predicted=0,
            measured=inside,
            unit="nodes",
        ),
        Check(
            what=Words(
                "chance that all state survives two lost nodes", "丢两个节点后状态仍完整的概率"
            ),
            predicted=formula,
            measured=sampled,
            unit="",
            within=0.02,
        ),
    ]


def _restored(memory: Ways, disk: Ways) -> list[Check]:
    return [
        Check(
            what=Words("tensors that came back unchanged", "原样恢复的张量数"),
            predicted=memory.tensors + disk.tensors,
            measured=memory.unchanged + disk.unchanged,
            unit="tensors",
        ),
        Check(
            what=Words("restore from disk over restore from memory", "从磁盘恢复 / 从内存恢复"),
            predicted=1.2,  # the file is warm in the page cache here: far more over a network
            measured=disk.got_s / memory.got_s,
            unit="x",
            kind="at_least",
        ),
    ]


def _table(gigabytes: float, ways: dict[str, Ways]) -> Table:
    return Table(
        columns=[
            Words("way", "途径"),
            Words("save, s", "保存（秒）"),
            Words("restore, s", "恢复（秒）"),
            Words("restore, GiB/s", "恢复（GiB/s）"),
        ],
        rows=[[name, one.put_s, one.got_s, gigabytes / one.got_s] for name, one in ways.items()],
    )


LAB = described(__file__, run)
