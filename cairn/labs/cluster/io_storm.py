"""A job of a thousand ranks restarts, and all of them open the same checkpoint at once.

    everybody reads    storage serves ranks x bytes          time = ranks x bytes / storage bandwidth
    one reads          storage serves bytes once, ranks pass it on over their own network (a tree: log2 of the ranks)

Bytes are counted where they leave the storage; the storage has a fixed bandwidth that all readers share, as a file
server has. Real threads, real files, a real lock for the line in front of the server.
"""

import math
import threading
import time
from pathlib import Path
from typing import NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

CHUNK = 512 << 10
STORAGE, LINK = 50e6, 400e6  # bytes a second: a network eight times as fast as the storage


class Restart(NamedTuple):
    """All ranks have the file again: everybody from the storage, or one and then a tree."""

    ranks: int
    storm_bytes: int  # that the storage served
    storm_s: float
    tree_bytes: int
    tree_s: float


class FileServer:
    """Serves chunks of files one after the other, never faster than its bandwidth, and counts them."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.served = 0
        self._line = threading.Lock()
        self._free = 0.0  # when it can begin with the next chunk

    def read(self, path: Path) -> bytes:
        parts = []
        with path.open("rb") as file:
            while part := file.read(CHUNK):
                with self._line:
                    self._free = max(self._free, time.monotonic()) + len(part) / self.bytes_per_s
                    ready_at, self.served = self._free, self.served + len(part)
                if (wait_s := ready_at - time.monotonic()) > 0:
                    time.sleep(wait_s)
                parts.append(part)
        return b"".join(parts)


def all_read(server: FileServer, path: Path, ranks: int) -> float:
    """Seconds until every rank has it from the server itself."""
    began = time.monotonic()
    threads = [threading.Thread(target=server.read, args=(path,)) for _ in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return time.monotonic() - began


def one_reads(server: FileServer, path: Path, ranks: int, link: float) -> float:
    """One reads, then each holder hands it to a rank without it, round after round; a hand-over takes bytes / link."""
    began = time.monotonic()
    data = server.read(path)
    have: list[bytes | None] = [data] + [None] * (ranks - 1)
    holders = 1
    while holders < ranks:
        time.sleep(len(data) / link)  # all pairs of a round at the same time
        for place in range(min(holders, ranks - holders)):
            have[holders + place] = have[place]
        holders = min(ranks, 2 * holders)
    assert all(part == data for part in have)
    return time.monotonic() - began


def run(bench: Workbench) -> Outcome:
    size = bench.size("mib") << 20
    path = bench.folder / "checkpoint"
    path.write_bytes(bytes(size))
    restarts = []
    for ranks in (*bench.pick((1, 2, 4, 8), (1, 4)), bench.size("ranks")):
        bench.step(f"{ranks} ranks restart")
        server, again = FileServer(STORAGE), FileServer(STORAGE)
        storm_s, tree_s = all_read(server, path, ranks), one_reads(again, path, ranks, LINK)
        restarts.append(Restart(ranks, server.served, storm_s, again.served, tree_s))
    return Outcome(
        checks=[*_bytes(restarts[-1], size), *_seconds(restarts[-1], size)],
        plots=[_plot(restarts, size / STORAGE)],
        table=_table(restarts),
        notes=[_note()],
    )


def _bytes(last: Restart, size: int) -> list[Check]:
    return [
        Check(
            what=Words(
                f"bytes that storage serves to {last.ranks} readers",
                f"{last.ranks} 个读者从存储读取的字节",
            ),
            predicted=last.ranks * size,
            measured=last.storm_bytes,
            unit="B",
        ),
        Check(
            what=Words("bytes when one reads and passes on", "一个读、其余转发时的字节"),
            predicted=size,
            measured=last.tree_bytes,
            unit="B",
        ),
    ]


def _seconds(last: Restart, size: int) -> list[Check]:
    rounds = math.ceil(math.log2(last.ranks))
    return [
        Check(
            what=Words(f"seconds of {last.ranks} readers at once", f"{last.ranks} 个同时读的秒数"),
            predicted=last.ranks * size / STORAGE,
            measured=last.storm_s,
            unit="s",
            within=0.3,
        ),
        Check(
            what=Words("seconds when one reads and passes on", "一个读再转发的秒数"),
            predicted=size / STORAGE + rounds * size / LINK,
            measured=last.tree_s,
            unit="s",
            within=0.5,
        ),
    ]


def _plot(restarts: list[Restart], once_s: float) -> Plot:
    return Plot(
        title=Words("Time to restart by ranks", "重启时间随 rank 数的变化"),
        x=Words("ranks", "rank 数"),
        y=Words("seconds", "秒"),
        lines={
            "everybody reads": [(float(one.ranks), one.storm_s) for one in restarts],
            "one reads, tree": [(float(one.ranks), one.tree_s) for one in restarts],
        },
        log_x=True,
        log_y=True,
        limit=("storage, once", once_s),
    )


def _table(restarts: list[Restart]) -> Table:
    return Table(
        columns=[
            Words("ranks", "rank 数"),
            Words("storage served, MB", "存储读出（MB）"),
            Words("everybody reads, s", "全部直读（秒）"),
            Words("storage served, MB (tree)", "存储读出（树，MB）"),
            Words("one reads, tree, s", "一读多转（秒）"),
        ],
        rows=[
            [one.ranks, one.storm_bytes / 1e6, one.storm_s, one.tree_bytes / 1e6, one.tree_s]
            for one in restarts
        ],
    )


def _note() -> Words:
    large = 16e9 * 12  # bytes: weights and AdamW's states of a 16B model
    all_minutes, tree_s = 1024 * large / 100e9 / 60, large / 100e9 + 10 * large / 50e9
    return Words(
        f"At scale: 1,024 replicas that each read {large / 1e9:.0f} GB from 100 GB/s of storage wait "
        f"{all_minutes:.0f} minutes; read once and passed on at 50 GB/s it is {tree_s:.0f} s, less if chunks are "
        "pipelined through the tree.",
        f"放大来看：1024 个副本各从 100 GB/s 的存储读 {large / 1e9:.0f} GB 要 {all_minutes:.0f} 分钟；"
        f"读一次再以 50 GB/s 转发只需 {tree_s:.0f} 秒，分块流水会更快。",
    )


LAB = described(__file__, run)
