"""Memory agent: a process per node that keeps in-memory checkpoints of its own ranks and of another node's.

    rank --memory that both see--> agent of node 0 --TCP--> agent of node 1
                                       keeps two copies of each rank         keeps two copies of each of them

It outlives the ranks, so a rank that dies finds its state where it left it; and if the whole node is lost, the other
agent has it. Over TCP it talks only to those who know the job's secret; its Unix socket lies in the owner's folder.
Does not know what the bytes are; no torch. The idea is Gemini's (SOSP 2023).
"""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cairn.comm.transfer.sockets import tune_for_bulk
from cairn.core.client_authenticator import ClientAuthenticator
from cairn.core.events import instant
from cairn.core.shared_secret import AuthenticationRefused, Secret, check_open
from cairn.train.checkpoint.memory_checksums import part_sums
from cairn.train.checkpoint.peer_link import Gone, Link, connect, payload
from cairn.train.checkpoint.peer_messages import (
    Ask,
    Done,
    Fetch,
    Forget,
    HeldCopy,
    Holdings,
    Keep,
    Open,
    Parts,
    Put,
    Reserve,
    Room,
    Sums,
    Written,
)
from cairn.train.checkpoint.peer_shard import SLOTS, Shard, mark
from cairn.train.recovery.status_board import Board

PATIENCE_S = 30.0  # for the other node, before a copy counts as not sent; for its bytes, while one is received
ACCEPT_AGAIN_S = 0.1
Key = tuple[int, int]  # generation, rank


class Doors(NamedTuple):
    """Sockets of an agent, created before the fork, so that a restarted agent keeps its address."""

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
        tune_for_bulk(remote, host)
        return cls(local, remote, path, f"{host}:{remote.getsockname()[1]}")

    def close(self) -> None:
        self.local.close()
        self.remote.close()


class Agent:
    def __init__(
        self,
        node: int,
        doors: Doors,
        peer: str | None,
        board: Board,
        secret: Secret | None = None,
        log_line: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`peer`: the address of the node that keeps copies of this one's ranks; None: none does."""
        check_open(doors.address.rpartition(":")[0], secret, "the memory of copies")
        self.node, self.doors, self.peer, self.board = node, doors, peer, board
        self.secret, self.log_line = secret, log_line
        self.authenticator = ClientAuthenticator(
            secret, f"the memory of copies of node {node}", log_line
        )
        self.own: dict[Key, Shard] = {}
        self.kept: dict[Key, Shard] = {}  # of ranks on other nodes
        self.lock = threading.Lock()
        self.link: Link | None = None  # to the peer
        self.linked_to: str | None = None
        self.outgoing: queue.SimpleQueue[Written] = queue.SimpleQueue()
        self.answers: dict[type, Any] = {
            Written: self._written,
            Put: self._put,
            Ask: self._ask,
            Fetch: self._fetch,
            Open: self._open,
            Reserve: self._reserve,
            Forget: self._forget,
            Keep: self._keep,
            Parts: self._parts,
        }

    def run(self) -> None:
        line = self.board.nodes[self.node]
        line["pid"], line["began_ns"] = os.getpid(), time.monotonic_ns()
        threading.Thread(target=self._send_on, daemon=True).start()
        threading.Thread(target=self._accept, args=(self.doors.local,), daemon=True).start()
        self._accept(self.doors.remote)

    def _accept(self, door: socket.socket) -> None:
        while True:
            try:
                connection, _ = door.accept()
            except OSError as error:
                if door.fileno() < 0:
                    return  # closed on purpose
                self.log_line(f"a connection was not accepted: {error}")
                time.sleep(ACCEPT_AGAIN_S)  # no descriptor may be free for a while
                continue
            target = self._serve if door is self.doors.local else self._welcome
            threading.Thread(target=target, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        """Authenticate and serve a connection from the network."""
        if self.authenticator.admits(connection):
            self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        # ValueError: the memory of a shard was closed while it was looked at.
        with Link(connection) as link, contextlib.suppress(OSError, ValueError):
            while True:
                message, _ = link.receive()
                answer = self.answers.get(type(message))
                if answer is None:
                    raise Gone(f"{type(message).__name__} is no question")
                answer(link, message)

    # -- a rank of this node ------------------------------------------------------------------------

    def _reserve(self, link: Link, request: Reserve) -> None:
        key = (request.generation, request.rank)
        with self.lock:
            shard = self.own.get(key)
            if shard is None or shard.size < request.size:
                shard = self._larger(self.own, key, request.size, request.world)
        link.send(Room(shard.size, shard.steps()), handed=shard.descriptor)

    @staticmethod
    def _larger(where: dict[Key, Shard], key: Key, size: int, world: int) -> Shard:
        before = where.pop(key, None)
        if before is not None:
            before.close()
        where[key] = Shard(size, world)
        return where[key]

    def _written(self, link: Link, copy: Written) -> None:
        shard = self.own.get((copy.generation, copy.rank))
        if shard is None:  # this agent is a new one
            link.send(Done(False, "nothing is reserved"))
            return
        shard.used[copy.slot], shard.sums[copy.slot] = copy.used, Sums(copy.cuts, [])
        link.send(Done())
        self.outgoing.put(copy)

    def _send_on(self) -> None:
        """Send copies to the other node, one after another."""
        while True:
            copy = self.outgoing.get()
            shard = self.own.get((copy.generation, copy.rank))
            with contextlib.suppress(ValueError):  # its memory was let go of in the meantime
                if shard is not None and shard.step(copy.slot) == copy.step:
                    self._send_one(copy, shard)

    def _send_one(self, copy: Written, shard: Shard) -> None:
        """A copy that no other node takes is settled all the same: the run goes on with one copy, and says so."""
        sums = part_sums(shard.view(copy.slot, copy.used), copy.cuts)
        if shard.step(copy.slot) != copy.step:
            return  # its rank writes there again: these are sums of neither copy
        shard.sums[copy.slot] = Sums(copy.cuts, sums)
        message = Put(
            copy.generation, copy.rank, copy.step, copy.used, copy.cuts, sums, shard.world
        )
        line = self.board.nodes
        taken = self.peer is not None and self._sent(message, shard, copy.slot)
        if taken:
            line["replicated_bytes"][self.node] += copy.used
        else:
            line["alone"][self.node] += 1
        if shard.step(copy.slot) == copy.step:  # still the same, so what was sent was whole
            if taken:
                self.board.set(copy.rank, replicated=copy.step)
            self.board.set(copy.rank, settled=copy.step)

    def _sent(self, message: Put, shard: Shard, slot: int) -> bool:
        for _ in range(2):  # the other agent may be a new one
            peer = self.peer
            try:
                if self.link is not None and self.linked_to != peer:
                    raise ConnectionError("another node keeps the copies now")
                if self.link is None:
                    self.link = connect(peer or ":0", PATIENCE_S, self.secret)
                    self.linked_to = peer
                self.link.send(message, payload(shard.view(slot, message.used)))
                answer, _ = self.link.receive()
                return isinstance(answer, Done) and answer.fine
            except OSError as error:
                if isinstance(error, AuthenticationRefused):
                    instant("copy refused", node=self.node, why=str(error))
                    self.log_line(f"no copy for the other node: {error}")
                if self.link is not None:
                    self.link.close()
                self.link = None
        return False

    # -- other nodes --------------------------------------------------------------------------------

    def _put(self, link: Link, copy: Put) -> None:
        key = (copy.generation, copy.rank)
        with self.lock:
            shard = self.kept.get(key)
            if shard is None or shard.size < copy.used:
                shard = self._larger(self.kept, key, copy.used, copy.world)
        with shard.filling:
            slot = shard.older()
            mark(shard.memory, slot, shard.size, -1)
            room = shard.view(slot, copy.used)
            first = bytearray(8)  # the step comes last, once all is there
            with link.patient(
                PATIENCE_S
            ):  # a sender that is cut off must not keep the room for ever
                link.receive_into([memoryview(first), room[8:]])
            # Before the step, by which the copy is found from then on.
            shard.used[slot], shard.sums[slot] = copy.used, Sums(copy.cuts, copy.sums)
            room[:8] = first
            fine = part_sums(room, copy.cuts) == copy.sums
            if not fine:
                mark(shard.memory, slot, shard.size, -1)
        link.send(Done(fine, "" if fine else "its bytes changed on the way"))

    def _ask(self, link: Link, _: Ask) -> None:
        with self.lock:
            shards = [*self.own.items(), *self.kept.items()]
        copies = [
            HeldCopy(*key, shard.step(slot), shard.used[slot], shard.check(slot), shard.world)
            for key, shard in shards
            for slot in range(SLOTS)
            if shard.step(slot) >= 0 and shard.used[slot]
        ]
        link.send(Holdings(copies))

    def _find(self, generation: int, rank: int, step: int) -> tuple[Shard, int] | None:
        for where in (self.own, self.kept):
            shard = where.get((generation, rank))
            if shard is not None and step in shard.steps():
                return shard, shard.steps().index(step)
        return None

    def _fetch(self, link: Link, request: Fetch) -> None:
        copy = self._find(request.generation, request.rank, request.step)
        if copy is None or not _all_within(request.stretches, copy[0].size):
            link.send(Done(False, f"no copy of rank {request.rank} at step {request.step}"))
            return
        shard, slot = copy
        link.send(Done(), payload(shard.view(slot, shard.size), request.stretches))

    def _parts(self, link: Link, request: Parts) -> None:
        """A copy that was not summed yet is summed now, so that at least the way from here to there is checked."""
        copy = self._find(request.generation, request.rank, request.step)
        if copy is None:
            link.send(Done(False, f"no copy of rank {request.rank} at step {request.step}"))
            return
        shard, slot = copy
        sums = shard.sums[slot]
        if not sums.sums:
            sums = Sums(sums.cuts, part_sums(shard.view(slot, shard.used[slot]), sums.cuts))
        link.send(sums)

    def _open(self, link: Link, request: Open) -> None:
        copy = self._find(request.generation, request.rank, request.step)
        if copy is None:
            link.send(Done(False, f"no copy of rank {request.rank} at step {request.step}"))
            return
        link.send(Room(copy[0].size, copy[0].steps()), handed=copy[0].descriptor)

    def _keep(self, link: Link, keeper: Keep) -> None:
        self.peer = keeper.address or None
        link.send(Done())

    def _forget(self, link: Link, request: Forget) -> None:
        with self.lock:
            for where in (self.own, self.kept):
                for key in [key for key in where if key[0] < request.generation]:
                    where.pop(key).close()
                for key, shard in where.items():
                    for slot in range(SLOTS):
                        if key[0] == request.generation and shard.step(slot) > request.after:
                            mark(shard.memory, slot, shard.size, -1)
        link.send(Done())


def _all_within(stretches: Sequence[tuple[int, int]], size: int) -> bool:
    return all(0 <= at <= at + length <= size for at, length in stretches)
