"""Back from memory: a rank's state, from its own node's memory or from another node's over TCP.

    Recall (which step, and where every rank's copy of it lies)  --recall_pieces-->  tensors, filled in place

What lies on this node is mapped and copied; what lies elsewhere is received straight into the tensors, without a stop
in between. Every copy that is read whole is held against its checksum. Which copies there are is asked of the agents.
"""

import mmap
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from torch import Tensor

from cairn.core.errors import DataError
from cairn.train.checkpoint.peer_agent import word_sum
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
    Done,
    Fetch,
    Forget,
    Held,
    Holdings,
    Open,
    Room,
    ask,
    receive,
    receive_into,
    send,
)
from cairn.train.checkpoint.piece import Piece

ANSWER_S = 30.0


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
    """How a rank on `node` gets at copies: its own agent by a path, the others by port."""

    node: int
    path: str
    ports: tuple[int, ...]  # by node


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
    address = ("127.0.0.1", reach.ports[copy.nodes[0]])
    return Remote(recall, links.enter_context(socket.create_connection(address, ANSWER_S)), copy)


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

    def read_into(self, entry: Entry, room: Tensor) -> None:
        room.copy_(self.read(entry))

    def check(self) -> None:
        """Done when it was opened."""


class Remote:
    """A copy on another node, entry by entry over one connection."""

    def __init__(self, recall: Recall, link: socket.socket, copy: Where) -> None:
        self.recall, self.link, self.copy = recall, link, copy
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(None)  # one call for a whole tensor; the kernel keeps the time
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(ANSWER_S), 0))
        prefix = self._bytes(0, PREFIX)
        text = self._bytes(PREFIX, table_length(bytes(prefix)))
        self.table: Table = read_table(bytes(text))
        self.sum = word_sum(memoryview(self._bytes(0, self.table.data)))
        self.left = {entry.key() for entry in self.table.entries if entry.size()}

    def read(self, entry: Entry) -> Tensor:
        room = torch.empty(entry.own, dtype=getattr(torch, entry.dtype))
        self.read_into(entry, room)
        return room

    def read_into(self, entry: Entry, room: Tensor) -> None:
        if not entry.size():
            return
        direct = room.is_contiguous() and not room.is_cuda
        home = room.detach() if direct else torch.empty(entry.own, dtype=room.dtype)
        bytes_of: Any = home.reshape(-1).view(torch.uint8).numpy()
        view = memoryview(bytes_of)
        self._fetch(self.table.data + entry.at, view)
        self.sum += word_sum(view)  # what fills up the last word is zero
        self.left.discard(entry.key())
        if not direct:
            room.copy_(home)

    def check(self) -> None:
        """Whether all that was received is what was written; only known if all was."""
        if not self.left and self.copy.check and self.sum % 2**64 != self.copy.check:
            raise _damaged(self.copy)

    def _bytes(self, offset: int, length: int) -> bytearray:
        room = bytearray(length)
        self._fetch(offset, memoryview(room))
        return room

    def _fetch(self, offset: int, room: memoryview) -> None:
        recall = self.recall
        wanted = Fetch(recall.generation, self.copy.rank, recall.step, offset, len(room))
        answer = ask(self.link, wanted)
        if not isinstance(answer, Done) or not answer.fine:
            raise _gone(self.copy, answer)
        receive_into(self.link, room)


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


def ask_holdings(port: int) -> list[Held]:
    """What one node has; nothing if it does not answer."""
    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_S) as link:
            answer = ask(link, Ask())
    except OSError:
        return []
    return answer.copies if isinstance(answer, Holdings) else []


def forget(port: int, generation: int, after: int) -> None:
    """Older generations, and the steps of this one after `after`."""
    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_S) as link:
            ask(link, Forget(generation, after))
    except OSError:
        return  # an agent that is gone has nothing to forget
