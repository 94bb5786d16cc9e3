"""Endpoint of a transport between processes: connections, messages and lost peers.

    listen -> accept thread -> hello both ways -> reader thread (frames) + writer thread (queue)
                                                  beat thread: a sign of life; silence is a loss

How bytes get from memory to memory is the `Mover`'s: in frames (`tcp`), through shared pages (`shm`), through NIXL.
Hello has the names, the regions and what the mover needs (descriptors, agents). Listens on 127.0.0.1 unless told
otherwise; elsewhere both ends have to know a secret (`core/shared_secret`). What travels is not encrypted: a cluster's
private network is the widest place for it.
"""

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from cairn.comm.transfer.byte_runs import ByteRuns
from cairn.comm.transfer.copies import Bytes
from cairn.comm.transfer.errors import PeerLost, TransferError
from cairn.comm.transfer.mover import (
    BEAT,
    BYE,
    HELLO,
    NOTE,
    OWN,
    PATIENCE,
    EndpointHello,
    Mover,
    Patience,
    TransferPeer,
)
from cairn.comm.transfer.sockets import CONNECT_S, bound, dialled, name_of
from cairn.comm.transfer.transport import (
    Event,
    MemoryRegion,
    Notification,
    PeerGone,
    PeerJoined,
    TransferDone,
    TransferFailed,
    check_reach,
    host_region,
)
from cairn.comm.transfer.wire import MOST_HELLO, ConnectionGone, Frame, Wire
from cairn.core.client_authenticator import ClientAuthenticator
from cairn.core.shared_secret import Secret

DRAIN_S = 1.0  # how long close() waits for a peer that does not read
ACCEPT_AGAIN_S = 0.1


class TransferEndpoint:
    def __init__(
        self,
        name: str,
        mover: Mover,
        host: str = "127.0.0.1",
        port: int = 0,
        patience: Patience = PATIENCE,
        secret: Secret | None = None,
    ) -> None:
        self.name, self.mover, self.patience, self.secret = name, mover, patience, secret
        self.authenticator = ClientAuthenticator(
            secret, f"transfer end {name}", patience_s=CONNECT_S
        )
        self.regions: dict[str, MemoryRegion] = {}
        self.peers: dict[str, TransferPeer] = {}
        self._where = (host, port)
        self._listener: socket.socket | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._tickets = itertools.count(1)
        self._lock = threading.Lock()
        self._hello: bytes | None = None
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def kind(self) -> str:
        return self.mover.kind

    # -- memory -------------------------------------------------------------------------------

    def allocate(self, region: str, nbytes: int) -> Bytes:
        memory = self.mover.allocate(nbytes)
        self.register(region, memory)
        return memory

    def register(self, region: str, memory: Bytes) -> None:
        self.register_region(host_region(region, memory))

    def register_region(self, region: MemoryRegion) -> None:
        """Register memory for transfers. It may be GPU memory if the mover supports it."""
        if self._hello is not None:
            raise TransferError(
                f"region {region.name!r} comes after listen()", hint="register regions first"
            )
        self.regions[region.name] = region

    # -- connections --------------------------------------------------------------------------

    def listen(self, greeting: bytes = b"") -> str:
        sizes = {name: region.nbytes for name, region in self.regions.items()}
        hello = EndpointHello(self.name, self.kind, sizes, self.mover.open(self), greeting)
        self._hello = msgspec.msgpack.encode(hello)
        self._listener = bound(self.mover.family, self.name, self._where, self.secret)
        for work in (self._accept, self._beat):
            self._start(work)
        return f"{self.kind}:{name_of(self._listener)}"

    def connect(self, address: str) -> str:
        kind, _, where = address.partition(":")
        if kind != self.kind:
            raise TransferError(
                f"{address!r} is an address of {kind!r}, and this end speaks {self.kind!r}",
                hint="both sides need the same transport",
            )
        if self._hello is None:
            raise TransferError("connect() before listen()", hint="call listen() first")
        try:
            return self._introduce(dialled(self.mover.family, where, self.secret)).name
        except (OSError, ConnectionGone, ValueError, OverflowError) as error:
            raise TransferError(
                f"no connection to {address}: {error}",
                hint="is the other side up, and this its port?",
            ) from None

    def drop(self, peer: str) -> None:
        self._cut(peer, "we cut the connection")

    def close(self) -> None:
        """Close after queued messages are sent: the last one may be the confirmation that everything has arrived."""
        self._closed.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts
            self._listener.close()
        with self._lock:
            peers = list(self.peers.values())
        deadline = time.monotonic() + DRAIN_S
        for peer in peers:
            peer.reason = "we closed"
            peer.wire.finish()
        for peer in peers:
            peer.wire.drain(deadline)
            peer.wire.close()
        for thread in list(self._threads):
            thread.join(timeout=5)
        self.mover.close()

    # -- moving -------------------------------------------------------------------------------

    def read(self, peer: str, source_region: str, target_region: str, runs: ByteRuns) -> int:
        there, here = self._checked(peer, source_region, target_region, runs.source, runs)
        self._reach(here.name, here.nbytes, runs.target, runs)
        ticket = self._ticket(there)
        self.mover.read(there, ticket, source_region, here, runs)
        return ticket

    def write(self, peer: str, source_region: str, target_region: str, runs: ByteRuns) -> int:
        there, here = self._checked(peer, target_region, source_region, runs.target, runs)
        self._reach(here.name, here.nbytes, runs.source, runs)
        ticket = self._ticket(there)
        self.mover.write(there, ticket, here, target_region, runs)
        return ticket

    def notify(self, peer: str, payload: bytes) -> None:
        there = self.peers.get(peer)
        if there is not None:
            there.wire.send(Frame(NOTE, 0, payload))

    def events(self, timeout_s: float = 0.0) -> list[Event]:
        events: list[Event] = []
        try:
            events.append(
                self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
            )
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    # -- for movers ---------------------------------------------------------------------------

    def settle(self, peer: TransferPeer, ticket: int, reason: str | None = None) -> None:
        """A ticket's one end: done, or failed for a reason."""
        with self._lock:
            if ticket not in peer.tickets:
                return
            peer.tickets.discard(ticket)
        ended = (
            TransferDone(peer.name, ticket)
            if reason is None
            else TransferFailed(peer.name, ticket, reason)
        )
        self._events.put(ended)

    def _ticket(self, peer: TransferPeer) -> int:
        ticket = next(self._tickets)
        with self._lock:
            if self.peers.get(peer.name) is not peer:
                raise PeerLost(f"{peer.name!r} is not connected", hint="connect again")
            peer.tickets.add(ticket)
        return ticket

    def _checked(
        self, peer: str, theirs: str, ours: str, starts: np.ndarray, runs: ByteRuns
    ) -> tuple[TransferPeer, MemoryRegion]:
        there = self.peers.get(peer)
        if there is None:
            raise PeerLost(f"{peer!r} is not connected", hint="connect again")
        unknown = (
            theirs if theirs not in there.regions else ours if ours not in self.regions else None
        )
        if unknown is not None:
            names = sorted(there.regions if unknown == theirs else self.regions)
            raise TransferError(f"no region {unknown!r}; there are {', '.join(names) or 'none'}")
        self._reach(theirs, there.regions[theirs], starts, runs)
        return there, self.regions[ours]

    def _reach(self, region: str, nbytes: int, starts: np.ndarray, runs: ByteRuns) -> None:
        problem = check_reach(region, nbytes, starts, runs.sizes)
        if problem is not None:
            raise TransferError(problem, hint="was the plan made for these layouts?")

    # -- threads ------------------------------------------------------------------------------

    def _introduce(self, connection: socket.socket) -> TransferPeer:
        """Hello both ways, then the connection's threads. Both ends do the same."""
        connection.settimeout(CONNECT_S)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(connection)
        try:
            wire.send_now(Frame(HELLO, 0, self._hello or b""))
            self.mover.greet(connection)
            frame = wire.receive(MOST_HELLO)
            hello = msgspec.msgpack.decode(frame.meta, type=EndpointHello)
            if frame.kind != HELLO or hello.kind != self.kind:
                raise ConnectionGone(f"it speaks {hello.kind!r}, not {self.kind!r}")
            if hello.name in self.peers or hello.name == self.name:
                raise ConnectionGone(f"there is already a connection to {hello.name!r}")
            peer = TransferPeer(wire, hello)
            self.mover.admit(peer, hello.mover, connection)
        except BaseException as error:
            connection.close()
            if isinstance(error, msgspec.MsgspecError):
                raise ConnectionGone("it sends what is not of this protocol") from None
            raise
        connection.settimeout(None)
        with self._lock:
            closed = self._closed.is_set()  # while it introduced itself: it would never be closed
            registered = None if closed else self.peers.setdefault(hello.name, peer)
        if registered is not peer:  # or both ends have called each other at the same time
            connection.close()
            self.mover.forget(peer)  # its pages were mapped when it was admitted
            why = (
                "this end is closed"
                if closed
                else f"there is already a connection to {hello.name!r}"
            )
            raise ConnectionGone(why)
        self._events.put(PeerJoined(hello.name, hello.greeting))
        wire.start()
        self._start(self._read, peer)
        return peer

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed; or no descriptor is free for a while, or the caller has gone
                self._closed.wait(ACCEPT_AGAIN_S)
                continue
            self._start(self._welcome, connection)  # a slow stranger must not keep others waiting

    def _welcome(self, connection: socket.socket) -> None:
        if connection.family != socket.AF_UNIX and not self.authenticator.admits(connection):
            return
        with contextlib.suppress(
            OSError, ConnectionGone
        ):  # a stranger, or one that has gone already
            self._introduce(connection)

    def _read(self, peer: TransferPeer) -> None:
        reason, dead = "it closed the connection", True
        try:
            while (frame := peer.wire.receive()).kind != BYE:
                if frame.kind == NOTE:
                    self._events.put(Notification(peer.name, frame.meta))
                elif frame.kind >= OWN:
                    self.mover.frame(peer, frame)
        except ConnectionGone as gone:
            reason, dead = str(gone), gone.dead
        finally:
            self._forget(peer, peer.reason or reason, dead and peer.reason is None)

    def _forget(self, peer: TransferPeer, reason: str, dead: bool) -> None:
        with self._lock:
            self.peers.pop(peer.name, None)  # from here on nothing new is posted
            under_way = sorted(peer.tickets)
        peer.wire.close()
        self.mover.forget(peer)
        for ticket in under_way:
            self.settle(peer, ticket, f"{peer.name} is lost: {reason}")
        peer.wire.end()
        self._events.put(PeerGone(peer.name, reason, dead))

    def _beat(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self.patience.beat_s):
            now = time.monotonic()
            # If this thread came late, so did the readers: then the silence may be our own.
            late = now - before > 3 * self.patience.beat_s
            before = now
            for peer in list(self.peers.values()):
                peer.wire.send(Frame(BEAT, 0, b""))
                received_bytes, since = peer.last_received
                if late or peer.wire.received_bytes != received_bytes:
                    peer.last_received = (peer.wire.received_bytes, now)
                elif now - since > self.patience.silence_s and not peer.wire.readable():
                    self._cut(peer.name, f"silent for {now - since:.1f} s")

    def _cut(self, name: str, reason: str) -> None:
        peer = self.peers.get(name)
        if peer is not None:
            peer.reason = peer.reason or reason
            peer.wire.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True, name="transfer")
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()
