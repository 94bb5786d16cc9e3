"""One small process per node that keeps ranks' state in memory, its own node's and another's.

    rank --memory that both see--> agent of node 0 --TCP--> agent of node 1
                                       keeps two copies of each rank         keeps two copies of each of them

It outlives the ranks, so a rank that dies finds its state where it left it; and if the whole node is lost, the other
agent has it. Memory has no name (memfd): it goes when the last process goes, however that ends. Does not know what the
bytes are; no torch. The idea is Gemini's (SOSP 2023).
"""

import contextlib
import mmap
import os
import queue
import socket
import threading
import time
from typing import Any, NamedTuple

from cairn.train.checkpoint.peer_wire import (
    Ask,
    Done,
    Fetch,
    Forget,
    Gone,
    Held,
    Holdings,
    Keep,
    Open,
    Put,
    Reserve,
    Room,
    Written,
    ask,
    connect,
    receive,
    receive_into,
    send,
    word_sum,
)
from cairn.train.recovery.board import Board

SLOTS = 2
PATIENCE_S = 30.0  # for the other node, before a copy counts as not sent
Key = tuple[int, int]  # generation, rank


class Shard:
    """Room for two copies of one rank's state. A copy begins with its step, -1 while it is written."""

    def __init__(self, size: int, world: int) -> None:
        self.world = world
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.descriptor = os.memfd_create("cairn-copies")
        os.ftruncate(self.descriptor, SLOTS * self.size)
        self.memory = mmap.mmap(self.descriptor, SLOTS * self.size)
        for slot in range(SLOTS):
            mark(self.memory, slot, self.size, -1)
        self.used = [0] * SLOTS
        self.checks = [0] * SLOTS
        self.filling = threading.Lock()

    def step(self, slot: int) -> int:
        return int.from_bytes(self.memory[slot * self.size : slot * self.size + 8], "little", signed=True)  # fmt: skip

    def steps(self) -> tuple[int, int]:
        return self.step(0), self.step(1)

    def older(self) -> int:
        return 0 if self.step(0) <= self.step(1) else 1

    def view(self, slot: int, length: int) -> memoryview:
        return memoryview(self.memory)[slot * self.size : slot * self.size + length]

    def close(self) -> None:
        os.close(self.descriptor)
        with contextlib.suppress(BufferError):  # a thread still sends from it; it goes with that
            self.memory.close()


def mark(memory: mmap.mmap, slot: int, size: int, step: int) -> None:
    memory[slot * size : slot * size + 8] = step.to_bytes(8, "little", signed=True)


class Doors(NamedTuple):
    """Where an agent is reached; made before the fork, so that a new agent has the old one's address."""

    local: socket.socket  # Unix
    remote: socket.socket  # TCP
    path: str
    address: str  # host:port

    @classmethod
    def open(cls, path: str, host: str = "127.0.0.1", port: int = 0) -> "Doors":
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.bind(path)
        local.listen(64)
        remote = socket.create_server((host, port), backlog=64)
        return cls(local, remote, path, f"{host}:{remote.getsockname()[1]}")

    def close(self) -> None:
        self.local.close()
        self.remote.close()


class Agent:
    def __init__(self, node: int, doors: Doors, peer: str | None, board: Board) -> None:
        """`peer`: the address of the node that keeps copies of this one's ranks; None: nobody does."""
        self.node, self.doors, self.peer, self.board = node, doors, peer, board
        self.own: dict[Key, Shard] = {}
        self.kept: dict[Key, Shard] = {}  # of ranks on other nodes
        self.lock = threading.Lock()
        self.link: socket.socket | None = None  # to the peer
        self.linked_to: str | None = None
        self.outgoing: queue.SimpleQueue[Written] = queue.SimpleQueue()
        self.answers: dict[type, Any] = {
            Written: self._written, Put: self._put, Ask: self._ask, Fetch: self._fetch,
            Open: self._open, Reserve: self._reserve, Forget: self._forget,
            Keep: self._keep,
        }  # fmt: skip

    def run(self) -> None:
        line = self.board.nodes[self.node]
        line["pid"], line["began_ns"] = os.getpid(), time.monotonic_ns()
        threading.Thread(target=self._send_on, daemon=True).start()
        threading.Thread(target=self._accept, args=(self.doors.local,), daemon=True).start()
        self._accept(self.doors.remote)

    def _accept(self, door: socket.socket) -> None:
        while True:
            connection, _ = door.accept()
            if (
                door is self.doors.remote
            ):  # a short answer must not wait for the acknowledgement of the one before
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while True:
                message, _ = receive(connection)
                answer = self.answers.get(type(message))
                if answer is None:
                    raise Gone(f"{type(message).__name__} is no question")
                answer(connection, message)

    # -- a rank of this node ------------------------------------------------------------------------

    def _reserve(self, connection: socket.socket, wanted: Reserve) -> None:
        key = (wanted.generation, wanted.rank)
        with self.lock:
            shard = self.own.get(key)
            if shard is None or shard.size < wanted.size:
                shard = self.own[key] = Shard(wanted.size, wanted.world)
        send(connection, Room(shard.size, shard.steps()), handed=shard.descriptor)

    def _written(self, connection: socket.socket, copy: Written) -> None:
        shard = self.own.get((copy.generation, copy.rank))
        if shard is None:  # this agent is a new one
            send(connection, Done(False, "nothing is reserved"))
            return
        shard.used[copy.slot], shard.checks[copy.slot] = copy.used, 0
        send(connection, Done())
        self.outgoing.put(copy)

    def _send_on(self) -> None:
        """One copy after another to the other node.

        A copy that no other node takes counts all the same: the run goes on with one copy rather than with none.
        """
        while True:
            copy = self.outgoing.get()
            shard = self.own.get((copy.generation, copy.rank))
            if shard is None or shard.step(copy.slot) != copy.step:
                continue  # overwritten or dropped in the meantime
            data = shard.view(copy.slot, copy.used)
            shard.checks[copy.slot] = word_sum(data)
            message = Put(
                copy.generation, copy.rank, copy.step, copy.used, shard.checks[copy.slot], shard.world
            )  # fmt: skip
            line = self.board.nodes
            if self.peer is not None and self._sent(message, data):
                line["replicated_bytes"][self.node] += copy.used
            else:
                line["alone"][self.node] += 1
            if shard.step(copy.slot) == copy.step:  # still the same, so what was sent was whole
                self.board.set(copy.rank, replicated=copy.step)

    def _sent(self, message: Put, data: memoryview) -> bool:
        for _ in range(2):  # the other agent may be a new one
            peer = self.peer
            try:
                if self.link is not None and self.linked_to != peer:
                    raise ConnectionError("another node keeps the copies now")
                if self.link is None:
                    self.link, self.linked_to = connect(peer or ":0", PATIENCE_S), peer
                answer = ask(self.link, message, data)
                return isinstance(answer, Done) and answer.fine
            except OSError:
                if self.link is not None:
                    self.link.close()
                self.link = None
        return False

    # -- other nodes --------------------------------------------------------------------------------

    def _put(self, connection: socket.socket, copy: Put) -> None:
        key = (copy.generation, copy.rank)
        with self.lock:
            shard = self.kept.get(key)
            if shard is None or shard.size < copy.used:
                shard = self.kept[key] = Shard(copy.used, copy.world)
        with shard.filling:
            slot = shard.older()
            mark(shard.memory, slot, shard.size, -1)
            room = shard.view(slot, copy.used)
            first = bytearray(8)  # the step comes last, once all is there
            receive_into(connection, first)
            receive_into(connection, room[8:])
            room[:8] = first
            fine = word_sum(room) == copy.check
            if not fine:
                mark(shard.memory, slot, shard.size, -1)
            shard.used[slot], shard.checks[slot] = copy.used, copy.check
        send(connection, Done(fine, "" if fine else "its bytes changed on the way"))

    def _ask(self, connection: socket.socket, _: Ask) -> None:
        with self.lock:
            known = [*self.own.items(), *self.kept.items()]
        copies = [
            Held(*key, shard.step(slot), shard.used[slot], shard.checks[slot], shard.world)
            for key, shard in known
            for slot in range(SLOTS)
            if shard.step(slot) >= 0 and shard.used[slot]
        ]
        send(connection, Holdings(copies))

    def _find(self, generation: int, rank: int, step: int) -> tuple[Shard, int] | None:
        for where in (self.own, self.kept):
            shard = where.get((generation, rank))
            if shard is not None and step in shard.steps():
                return shard, shard.steps().index(step)
        return None

    def _fetch(self, connection: socket.socket, wanted: Fetch) -> None:
        found = self._find(wanted.generation, wanted.rank, wanted.step)
        ends = [offset + length for offset, length in wanted.stretches]
        if found is None or max(ends, default=0) > found[0].size:
            send(connection, Done(False, f"no copy of rank {wanted.rank} at step {wanted.step}"))
            return
        shard, slot = found
        send(connection, Done())
        copy = shard.view(slot, shard.size)
        for offset, length in wanted.stretches:  # sendfile is slower: it goes page by page
            connection.sendall(copy[offset : offset + length])

    def _open(self, connection: socket.socket, wanted: Open) -> None:
        found = self._find(wanted.generation, wanted.rank, wanted.step)
        if found is None:
            send(connection, Done(False, f"no copy of rank {wanted.rank} at step {wanted.step}"))
            return
        send(connection, Room(found[0].size, found[0].steps()), handed=found[0].descriptor)

    def _keep(self, connection: socket.socket, keeper: Keep) -> None:
        self.peer = keeper.address or None
        send(connection, Done())

    def _forget(self, connection: socket.socket, wanted: Forget) -> None:
        with self.lock:
            for where in (self.own, self.kept):
                for key in [key for key in where if key[0] < wanted.generation]:
                    where.pop(key).close()
                for key, shard in where.items():
                    for slot in range(SLOTS):
                        if key[0] == wanted.generation and shard.step(slot) > wanted.after:
                            mark(shard.memory, slot, shard.size, -1)
        send(connection, Done())
