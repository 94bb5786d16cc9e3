"""Back from memory: a rank's state, from its own node's memory or from another node's over TCP.

    Recall (which step, and where every rank's copy of it lies)  --recall_pieces-->  tensors, filled in place

What lies on this node is mapped and copied; what lies elsewhere is received straight into the tensors; both by several
threads at once (`peer_readers`). Every tensor is held against the checksum that it had when the copy was made, whether
the whole copy is read or, by another layout, a part of it. Where one node's copy is damaged or gone, another node's is
read. Which copies there are is asked of the agents.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from cairn.core.errors import ConfigError, DataError
from cairn.core.events import instant, span
from cairn.core.shared_secret import VARIABLE, AuthenticationRefused, Secret
from cairn.train.checkpoint.memory_checksums import word_sum
from cairn.train.checkpoint.peer_link import Gone, connect, connect_local, reason
from cairn.train.checkpoint.peer_messages import (
    Ask,
    Forget,
    HeldCopy,
    Holdings,
    Keep,
    Open,
    Parts,
    Room,
    Sums,
)
from cairn.train.checkpoint.peer_pack import (
    PREFIX,
    Entry,
    Source,
    Table,
    bytes_of,
    fill,
    read_table,
    table_length,
    tensor_at,
)
from cairn.train.checkpoint.peer_readers import ANSWER_S, Mapped, PieceRead, Remote
from cairn.train.checkpoint.piece import Piece

Found = TypeVar("Found")


class Where(msgspec.Struct, frozen=True):
    """A copy that can be read: whose, and on which nodes."""

    rank: int
    nodes: tuple[int, ...]
    check: int


class Recall(msgspec.Struct, frozen=True):
    """The step to resume from, and the location of every rank's copy."""

    step: int
    generation: int
    copies: tuple[Where, ...]  # by rank


class Reach(msgspec.Struct, frozen=True):
    """Access of a rank on `node` to copies: its own agent by path, the others by address.

    `paths`: of all agents, where all nodes are groups of processes on this machine. Their memory is mapped, too.
    """

    node: int
    path: str
    addresses: tuple[str, ...]  # host:port, by node
    secret: Secret | None = None  # of the job
    paths: tuple[str, ...] = ()  # by node

    def path_to(self, node: int) -> str | None:
        if node == self.node:
            return self.path
        return self.paths[node] if self.paths else None


def recall_pieces(
    recall: Recall, reach: Reach, rank: int, pieces: Mapping[str, Piece]
) -> dict[str, Any]:
    """Reads the state of `recall.step` into `pieces`; what was said about it when it was written."""
    abouts: list[dict[str, Any]] = []
    with ExitStack() as opened:

        def sources() -> Iterator[Source]:
            for copy in _nearest(recall.copies, rank, reach.node):
                source = Copy(recall, reach, copy)
                opened.callback(source.close)
                abouts.append(source.table.about)
                yield source

        fill(pieces, sources())
    return abouts[0]


def _nearest(copies: tuple[Where, ...], rank: int, node: int) -> list[Where]:
    """The rank's own part first, then what lies on its node, then the rest."""
    return sorted(copies, key=lambda copy: (copy.rank != rank, node not in copy.nodes, copy.rank))


class Copy:
    """A rank's copy, read from the first of its nodes that returns it undamaged."""

    table: Table

    def __init__(self, recall: Recall, reach: Reach, where: Where) -> None:
        self.recall, self.reach, self.where = recall, reach, where
        self.nodes = sorted(where.nodes, key=lambda node: node != reach.node)  # this one first
        self.reader: Remote | Mapped | None = None
        self.sums: dict[int, int] = {}  # of the part that begins there
        self.table = self._on_any_node(lambda: self.table)

    def read(self, entry: Entry) -> Tensor:
        return self._on_any_node(lambda: self._looked_at(entry))

    def read_into(self, rooms: Sequence[tuple[Entry, Tensor]]) -> None:
        self._on_any_node(lambda: self._carried(rooms))

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
        self.reader = None

    def _on_any_node(self, work: Callable[[], Found]) -> Found:
        """A node whose copy is damaged, gone or out of reach is not asked again."""
        while True:
            try:
                if self.reader is None:
                    with span("copy opened", rank=self.where.rank, node=self.nodes[0]):
                        self._open(self.nodes[0])
                return work()
            except (DataError, OSError) as error:
                self.close()
                node = self.nodes.pop(0)
                instant("copy passed over", rank=self.where.rank, node=node, why=str(error))
                if not self.nodes:
                    raise _gone(self.where, error) if isinstance(error, Gone) else error from None

    def _open(self, node: int) -> None:
        """Its description and its checksums, which have to add up to the one that the agents have named."""
        which = (self.recall.generation, self.where.rank, self.recall.step)
        if (path := self.reach.path_to(node)) is not None:
            reader = _mapped(path, *which)
        else:
            reader = Remote(self.reach.addresses[node], *which, self.reach.secret)
        self.reader = reader
        self.sums = reader.parts()
        if self.where.check and sum(self.sums.values()) % 2**64 != self.where.check:
            raise _damaged(self.where)
        self.table = self._read_table(reader)

    def _read_table(self, reader: Remote | Mapped) -> Table:
        """Read the header, verified by its checksum before use."""
        data = min((cut for cut in self.sums if cut), default=0)
        head = reader.look(0, data or table_length(reader.look(0, PREFIX)) + PREFIX)
        if data and word_sum(head) != self.sums[0]:
            raise _damaged(self.where)
        return read_table(head[PREFIX : PREFIX + table_length(head)])

    def _looked_at(self, entry: Entry) -> Tensor:
        if not entry.size():
            return torch.empty(entry.own, dtype=getattr(torch, entry.dtype))
        at = self.table.data + entry.at
        data = self._reader().look(at, entry.size())
        self._verify({at: word_sum(data)})
        return tensor_at(data, msgspec.structs.replace(entry, at=0), 0)

    def _carried(self, rooms: Sequence[tuple[Entry, Tensor]]) -> None:
        """Tensors in one stretch of this machine's memory are filled in place, by all lanes; others by way of it."""
        reader = self._reader()
        pieces, copied, homes = [], [], []  # homes: kept, because nothing else holds their memory
        for entry, room in rooms:
            direct = room.is_contiguous() and not room.is_cuda
            if not direct and reader.in_place:
                room.copy_(self._looked_at(entry))
                continue
            home = room.detach() if direct else torch.empty(entry.own, dtype=room.dtype)
            if not direct:
                copied.append((room, home))
            if entry.size():
                at = self.table.data + entry.at
                pieces.append(PieceRead(at, bytes_of(home)))
                homes.append(home)
        self._verify(reader.read(pieces) if pieces else {})
        for room, home in copied:
            room.copy_(home)

    def _verify(self, read: Mapping[int, int]) -> None:
        """Verify checksums; the padding of each tensor's last word is zero on both sides."""
        if any(self.sums.get(at) != value for at, value in read.items()):
            raise _damaged(self.where)

    def _reader(self) -> Remote | Mapped:
        assert self.reader is not None
        return self.reader


def _mapped(path: str, generation: int, rank: int, step: int) -> Mapped:
    """A copy on this machine: the agent hands its memory over. Pages come as the lanes touch them, on all cores."""
    with connect_local(path, ANSWER_S) as link:
        room = link.ask(Open(generation, rank, step))
        if not isinstance(room, Room):
            raise Gone(reason(room))
        descriptor = link.receive_descriptor()
        try:
            if step not in room.steps:
                raise Gone("it was overwritten")
            place = room.steps.index(step) * room.size
            memory = mmap.mmap(descriptor, room.size, flags=mmap.MAP_SHARED, offset=place)
        finally:
            os.close(descriptor)
        parts = link.ask(Parts(generation, rank, step))
    if not isinstance(parts, Sums):
        raise Gone(reason(parts))
    return Mapped(memory, step, dict(zip(parts.cuts, parts.sums, strict=True)))


def _gone(copy: Where, answer: object) -> DataError:
    return DataError(f"the copy of rank {copy.rank} is gone: {answer}", hint="go on from disk")


def _damaged(copy: Where) -> DataError:
    return DataError(
        f"the copy of rank {copy.rank} in memory is damaged: its checksum differs",
        hint="go on from disk",
    )


# -- what there is -----------------------------------------------------------------------------------


def ask_holdings(address: str, secret: Secret | None = None) -> list[HeldCopy]:
    """Copies of a node; empty if it does not respond. A different secret is a configuration error."""
    try:
        with connect(address, ANSWER_S, secret) as link:
            answer = link.ask(Ask())
    except AuthenticationRefused as error:
        raise ConfigError(
            f"no copies can be read: {error}", hint=f"every node of a job has the same {VARIABLE}"
        ) from None
    except OSError:
        return []
    return answer.copies if isinstance(answer, Holdings) else []


def forget(address: str, generation: int, after: int, secret: Secret | None = None) -> None:
    """Older generations, and the steps of this one after `after`."""
    try:
        with connect(address, ANSWER_S, secret) as link:
            link.ask(Forget(generation, after))
    except OSError:
        return  # an agent that is gone has nothing to forget


def keep_at(address: str, keeper: str, secret: Secret | None = None) -> None:
    """Tells the agent at `address` who keeps copies of its ranks from now on; empty: none."""
    with connect(address, ANSWER_S, secret) as link:
        link.ask(Keep(keeper))
