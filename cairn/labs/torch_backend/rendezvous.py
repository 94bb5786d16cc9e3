"""Rendezvous: each rank publishes its address in the store, then the ranks connect.

    publish: world, host, pid, settings    -->    same host: one segment of shared memory
    read the hellos of all ranks           -->    other host: two sockets, for collectives and for sends

No rank listens unless a peer is on another host, and then only to those that know a secret that rank 0 has put into the
store. A rank that disagrees (another world size, other settings, a rank that is taken) and one that never comes are
named, on every rank that waits.
"""

import contextlib
import os
import queue
import socket
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from cairn.core.client_authenticator import ClientAuthenticator
from cairn.core.shared_secret import Secret, enter
from cairn.labs.torch_backend.errors import CommError, CommTimeout, GroupStopped, RankMismatch
from cairn.labs.torch_backend.link import Link
from cairn.labs.torch_backend.options import Options, piece_bytes
from cairn.labs.torch_backend.segment import Segment
from cairn.labs.torch_backend.shared_link import Peer, SharedLink
from cairn.labs.torch_backend.tcp_link import TcpLink

COLLECTIVE, DIRECT = 0, 1  # purposes of a connection: the group's operations, sends and receives
PURPOSES = 2
Arrival = tuple[int, int, socket.socket]  # purpose, rank, connection
LOOK_S = 0.01  # between two looks into the store
STOP = "stopped"
MAGIC = b"cairn-comm-1"


class Hello(msgspec.Struct, frozen=True):
    """The record that a rank publishes about itself."""

    rank: int
    world: int
    host: str
    pid: int
    settings: str  # what all ranks must have alike


class Mesh(NamedTuple):
    """Connected: a link to every peer for each purpose, and who shares memory with this rank."""

    rank: int
    hosts: list[str]  # of every rank
    names: list[int]  # of every rank, as the world calls it
    links: list[dict[int, Any]]  # by purpose, by rank
    segment: Segment | None
    local: list[int]  # ranks of this host, in order
    peers: dict[int, Peer]  # processes of this host


class Room:
    """The store, seen by one rank that is in a hurry: every wait has an end and a reason."""

    def __init__(
        self, store: Any, rank: int, world: int, names: list[int], timeout: timedelta
    ) -> None:
        self.store, self.rank, self.world, self.names = store, rank, world, names
        self.deadline = time.monotonic() + timeout.total_seconds()
        self.timeout_s = timeout.total_seconds()

    def publish(self, key: str, value: bytes | str) -> None:
        self.store.set(key, value)

    def receive(self, key: str, rank: int, what: str) -> bytes:
        """Wait for a value of another rank; raise an error that names the rank if it never comes."""
        pause = LOOK_S / 10
        while not self.store.check([key]):
            self.look_for_a_stop()
            if time.monotonic() > self.deadline:
                raise CommTimeout(
                    f"it waited {self.timeout_s:g} s for rank {self.names[rank]} of {self.world} to {what}",
                    hint="is it running, and does it have the same world size and store?",
                )
            time.sleep(pause)
            pause = min(pause * 2, LOOK_S)
        return self.store.get(key)

    def look_for_a_stop(self) -> None:
        if self.store.check([STOP]):
            raise GroupStopped(f"init: {self.store.get(STOP).decode()}")


def meet(
    store: Any, rank: int, world: int, names: list[int], timeout: timedelta, options: Options
) -> Mesh:
    """Blocks until all ranks are connected, or raises on every one of them."""
    room = Room(store, rank, world, names, timeout)
    try:
        return _meet(room, options)
    except GroupStopped:
        raise
    except (CommError, OSError) as error:
        kind, hint = (
            (type(error), error.hint) if isinstance(error, CommError) else (CommError, None)
        )
        message = error.message if isinstance(error, CommError) else str(error)
        reason = f"rank {names[rank]} could not join: {message}"
        room.publish(STOP, reason)
        raise kind(f"init: {reason}", hint=hint) from error


def _meet(room: Room, options: Options) -> Mesh:
    rank, world = room.rank, room.world
    hellos = _introduce(room, options)
    hosts = [hello.host for hello in hellos]
    local = [r for r in range(world) if hosts[r] == hosts[rank]]
    remote = [r for r in range(world) if hosts[r] != hosts[rank]]
    segment, fd = _share(room, local, hellos, options) if len(local) > 1 else (None, None)
    peers: dict[int, Peer] = {}
    links: list[dict[int, Link]] = [{} for _ in range(PURPOSES)]
    if segment is not None:
        here = local.index(rank)
        for there, other in enumerate(local):
            if other == rank:
                continue
            peers[other] = Peer(hellos[other].pid, segment, there)
            for purpose in range(PURPOSES):
                out, back = segment.ring(here, there, purpose), segment.ring(there, here, purpose)
                links[purpose][other] = SharedLink(out, back, peers[other])
    if remote:
        for purpose, other, connection in _connect(room, remote, options):
            links[purpose][other] = TcpLink(connection)
    room.publish(f"ready/{rank}", b"1")
    for other in range(world):
        room.receive(f"ready/{other}", other, "connect to its peers")
    if fd is not None:
        os.close(fd)  # mapped by all by now; the memory goes with the last of them
    return Mesh(rank, hosts, room.names, links, segment, local, peers)


def _introduce(room: Room, options: Options) -> list[Hello]:
    settings = f"deterministic={options.deterministic}, schedule={options.schedule!r}, "
    settings += f"tcp {options.tcp_gbit:g} Gbit/s and {options.tcp_alpha_us:g} us, "
    settings += f"{options.places} x {options.piece} B"
    mine = Hello(room.rank, room.world, options.host or host_identity(), os.getpid(), settings)
    if room.store.add(f"joined/{room.rank}", 1) > 1:
        raise RankMismatch(
            f"two processes are rank {room.names[room.rank]} of {room.world}",
            hint="give every process a rank of its own",
        )
    room.publish(f"hello/{room.rank}", msgspec.json.encode(mine))
    hellos = []
    for other in range(room.world):
        theirs = msgspec.json.decode(room.receive(f"hello/{other}", other, "join"), type=Hello)
        for what, there, here in (
            ("a world of", theirs.world, mine.world),
            ("settings", theirs.settings, mine.settings),
        ):
            if there != here:
                raise RankMismatch(
                    f"rank {room.names[other]} has {what} {there}, rank {room.names[room.rank]} {here}",
                    hint="start every rank with the same world size and CAIRN_COMM_* settings",
                )
        hellos.append(theirs)
    return hellos


def host_identity() -> str:
    """Equal for processes that can share memory and see each other: one kernel, one namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
    return "-".join([boot, *map(str, spaces)])


def _share(
    room: Room, local: list[int], hellos: list[Hello], options: Options
) -> tuple[Segment, int]:
    """The segment of this host, and its file, to be closed when all have it."""
    leader = local[0]
    key = f"segment/{leader}"
    shape = (len(local), piece_bytes(options, len(local)), options.places, PURPOSES)
    if room.rank == leader:
        fd = Segment.make_file()
        segment = Segment(*shape, fd)
        segment.create()
        room.publish(key, str(fd))
        return segment, fd
    theirs = int(room.receive(key, leader, "share its memory"))
    fd = Segment.open_file(hellos[leader].pid, theirs)
    return Segment(*shape, fd), fd


def own_address(store: Any) -> str:
    """The address of this host from which the store is reached."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    target = getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or "127.0.0.1"
    family = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # sends nothing: only asks for the route
        return probe.getsockname()[0]


def _listen(address: str, options: Options, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, options.port), family=family, backlog=backlog)
    except OSError as error:
        raise CommError(
            f"cannot listen on {address} port {options.port}: {os.strerror(error.errno or 0)}",
            hint="leave CAIRN_COMM_PORT unset for any free port, or set CAIRN_COMM_ADDRESS",
        ) from None


def _connect(room: Room, remote: list[int], options: Options) -> list[Arrival]:
    """Connects to lower ranks of other hosts, accepts from higher ones."""
    address = options.address or own_address(room.store)
    arrivals: list[Arrival] = []
    secret = _secret(room)
    with _listen(address, options, PURPOSES * len(remote)) as server:
        port = server.getsockname()[1]
        room.publish(f"listens/{room.rank}", f"{address} {port}")
        for other in (r for r in remote if r < room.rank):
            there, port = room.receive(f"listens/{other}", other, "listen").decode().split()
            for purpose in range(PURPOSES):
                arrivals.append((purpose, other, _call(room, (there, int(port)), purpose, secret)))
        expected = {(p, r) for p in range(PURPOSES) for r in remote if r > room.rank}
        entrance = Entrance(server, ClientAuthenticator(secret, f"rank {room.names[room.rank]}"))
        try:
            while expected:
                purpose, other, connection = _next(room, entrance, {r for _, r in expected})
                if (purpose, other) in expected:
                    expected.discard((purpose, other))
                    arrivals.append((purpose, other, connection))
                else:
                    connection.close()
        finally:
            entrance.close()
    return arrivals


def _secret(room: Room) -> Secret:
    """The secret of the group, which every process that can read the store knows. Rank 0 creates it."""
    if room.rank == 0:
        fresh = Secret.fresh()
        room.publish("secret", fresh.reveal())
        return fresh
    return Secret(room.receive("secret", 0, "share a secret"))


def _call(room: Room, where: tuple[str, int], purpose: int, secret: Secret) -> socket.socket:
    wait = max(room.deadline - time.monotonic(), 0.1)
    connection = socket.create_connection(where, timeout=wait)
    try:
        enter(connection, secret, wait)
        connection.sendall(MAGIC + bytes([purpose]) + room.rank.to_bytes(4, "little"))
    except BaseException:
        connection.close()
        raise
    return connection


class Entrance:
    """Peers that have come; each is asked by a thread of its own, so that a stranger does not keep others waiting."""

    def __init__(self, server: socket.socket, authenticator: ClientAuthenticator) -> None:
        self.server, self.authenticator = server, authenticator
        self.arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        threading.Thread(target=self._accept, daemon=True, name="rendezvous").start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.server.accept()
                threading.Thread(target=self._ask, args=(connection,), daemon=True).start()

    def _ask(self, connection: socket.socket) -> None:
        if not self.authenticator.admits(connection):
            return
        connection.settimeout(5)
        try:
            hello = connection.recv(len(MAGIC) + 5, socket.MSG_WAITALL)
        except OSError:
            hello = b""
        if hello.startswith(MAGIC) and len(hello) == len(MAGIC) + 5:
            self.arrived.put((hello[-5], int.from_bytes(hello[-4:], "little"), connection))
        else:
            connection.close()


def _next(room: Room, entrance: Entrance, missing: set[int]) -> Arrival:
    """The next peer that comes; an error that names those who never do."""
    while True:
        room.look_for_a_stop()
        with contextlib.suppress(queue.Empty):
            return entrance.arrived.get(timeout=0.2)
        if time.monotonic() > room.deadline:
            names = sorted(room.names[r] for r in missing)
            raise CommTimeout(
                f"ranks {names} did not connect within {room.timeout_s:g} s",
                hint="can their hosts reach this address? see CAIRN_COMM_ADDRESS",
            )
