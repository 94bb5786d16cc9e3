"""Back from memory: a rank's state, from its own node's memory or from another node's over TCP.

    Recall (which step, and where every rank's copy of it lies)  --recall_pieces-->  tensors, filled in place

What lies on this node is mapped and copied; what lies elsewhere is received straight into the tensors, over several
connections at once (`peer_lanes`). Every copy that is read whole is held against its checksum. Which copies there are
is asked of the agents.
"""

import mmap
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from torch import Tensor

from cairn.core.errors import DataError
from cairn.train.checkpoint.peer_lanes import ANSWER_S, Lanes, Wanted
from cairn.train.checkpoint.peer_pack import (
    PREFIX,
    Entry,
    Source,
    Table,
    fill,
    read_table,
    table_length,
    tensor_at,
)
from cairn.train.checkpoint.peer_wire import (
    Ask,
    Forget,
    Gone,
    Held,
    Holdings,
    Keep,
    Open,
    Room,
    ask,
    connect,
    receive,
    send,
    word_sum,
)
from cairn.train.checkpoint.piece import Piece


class Where(msgspec.Struct, frozen=True):
    """A copy that can be read: whose, and on which nodes."""

    rank: int
    nodes: tuple[int, ...]
    check: int


class Recall(msgspec.Struct, frozen=True):
    """From which step on, and where every rank's part of it lies."""

    step: int
    generation: int
    copies: tuple[Where, ...]  # by rank


class Reach(msgspec.Struct, frozen=True):
    """How a rank on `node` gets at copies: its own agent by a path, the others by address."""

    node: int
    path: str
    addresses: tuple[str, ...]  # host:port, by node


def recall_pieces(
    recall: Recall, reach: Reach, rank: int, pieces: Mapping[str, Piece]
) -> dict[str, Any]:
    """Reads the state of `recall.step` into `pieces`; what was said about it when it was written."""
    abouts: list[dict[str, Any]] = []
    with ExitStack() as open_links:

        def sources() -> Iterator[Source]:
            for copy in _nearest(recall.copies, rank, reach.node):
                source = _opened(recall, reach, copy, open_links)
                abouts.append(source.table.about)
                yield source

        fill(pieces, sources())
    return abouts[0]


def _nearest(copies: tuple[Where, ...], rank: int, node: int) -> list[Where]:
    """The rank's own part first, then what lies on its node, then the rest."""
    return sorted(copies, key=lambda copy: (copy.rank != rank, node not in copy.nodes, copy.rank))


def _opened(recall: Recall, reach: Reach, copy: Where, links: ExitStack) -> "Mapped | Remote":
    if reach.node in copy.nodes:
        return Mapped(recall, reach.path, copy)
    address = reach.addresses[copy.nodes[0]]
    lanes = links.enter_context(Lanes(address, recall.generation, copy.rank, recall.step))
    return Remote(lanes, copy)


class Mapped:
    """A copy on this node: the agent hands its memory over."""

    def __init__(self, recall: Recall, path: str, copy: Where) -> None:
        self.copy = copy
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(ANSWER_S)
            link.connect(path)
            send(link, Open(recall.generation, copy.rank, recall.step))
            room, descriptor = receive(link)
        if not isinstance(room, Room) or descriptor is None:
            raise _gone(copy, room)
        slot = room.steps.index(recall.step)
        try:
            memory = mmap.mmap(
                descriptor, room.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
                offset=slot * room.size,
            )  # fmt: skip
        finally:
            os.close(descriptor)
        self.view = memoryview(memory)
        self.table = read_table(self.view[PREFIX : PREFIX + table_length(self.view)])
        if copy.check and word_sum(self.view[: _used(self.table)]) != copy.check:
            raise _damaged(copy)

    def read(self, entry: Entry) -> Tensor:
        return tensor_at(self.view, entry, self.table.data)

    def read_into(self, rooms: Sequence[tuple[Entry, Tensor]]) -> None:
        for entry, room in rooms:
            room.copy_(self.read(entry))

    def check(self) -> None:
        """Done when it was opened."""


class Remote:
    """A copy on another node."""

    def __init__(self, lanes: Lanes, copy: Where) -> None:
        self.lanes, self.copy, self.sum = lanes, copy, 0
        prefix = self._bytes(0, PREFIX)
        text = self._bytes(PREFIX, table_length(bytes(prefix)))
        self.table: Table = read_table(bytes(text))
        self.sum = word_sum(self._bytes(0, self.table.data))
        self.left = {entry.key() for entry in self.table.entries if entry.size()}

    def read(self, entry: Entry) -> Tensor:
        room = torch.empty(entry.own, dtype=getattr(torch, entry.dtype))
        self.read_into([(entry, room)])
        return room

    def read_into(self, rooms: Sequence[tuple[Entry, Tensor]]) -> None:
        """Tensors that lie in one stretch of this machine's memory are received in place."""
        wanted, copied = [], []
        for entry, room in rooms:
            direct = room.is_contiguous() and not room.is_cuda
            home = room.detach() if direct else torch.empty(entry.own, dtype=room.dtype)
            if not direct:
                copied.append((room, home))
            if entry.size():
                bytes_of: Any = home.reshape(-1).view(torch.uint8).numpy()
                wanted.append(Wanted(self.table.data + entry.at, memoryview(bytes_of)))
                self.left.discard(entry.key())
        self.sum += self._read(wanted)  # what fills up the last word of each is zero
        for room, home in copied:
            room.copy_(home)

    def check(self) -> None:
        """Whether all that was received is what was written; only known if all was."""
        if not self.left and self.copy.check and self.sum % 2**64 != self.copy.check:
            raise _damaged(self.copy)

    def _bytes(self, offset: int, length: int) -> bytearray:
        room = bytearray(length)
        self._read([Wanted(offset, memoryview(room))])
        return room

    def _read(self, wanted: list[Wanted]) -> int:
        try:
            return self.lanes.read(wanted)
        except Gone as error:
            raise _gone(self.copy, error) from None


def _used(table: Table) -> int:
    last = table.entries[-1]
    return table.data + last.at + last.size()


def _gone(copy: Where, answer: object) -> DataError:
    return DataError(f"the copy of rank {copy.rank} is gone: {answer}", hint="go on from disk")


def _damaged(copy: Where) -> DataError:
    return DataError(
        f"the copy of rank {copy.rank} in memory is damaged: its checksum differs",
        hint="go on from disk",
    )


# -- what there is -----------------------------------------------------------------------------------


def ask_holdings(address: str) -> list[Held]:
    """What one node has; nothing if it does not answer."""
    try:
        with connect(address, ANSWER_S) as link:
            answer = ask(link, Ask())
    except OSError:
        return []
    return answer.copies if isinstance(answer, Holdings) else []


def forget(address: str, generation: int, after: int) -> None:
    """Older generations, and the steps of this one after `after`."""
    try:
        with connect(address, ANSWER_S) as link:
            ask(link, Forget(generation, after))
    except OSError:
        return  # an agent that is gone has nothing to forget


def keep_at(address: str, keeper: str) -> None:
    """Tells the agent at `address` who keeps copies of its ranks from now on; empty: nobody."""
    with connect(address, ANSWER_S) as link:
        ask(link, Keep(keeper))
