"""Connections between the watches of nodes: lines of JSON, after both ends have proved that they know the job's secret.

    Door: accept --> a thread for each --> ClientAuthenticator --> let_in()          call(host, port, secret) --> Link

Knows no watch and no message.
"""

import contextlib
import queue
import socket
import threading
import time
from pathlib import Path

import msgspec

from cairn.core.client_authenticator import ClientAuthenticator
from cairn.core.shared_secret import Secret, enter

DOOR = "watch"  # in the node's folder: where its watch is reached
CALL_S = 1.0  # for a connection, and for its secret
ACCEPT_AGAIN_S = 0.1
BACKLOG = 1024  # nodes that call at the same time
MOST_BYTES = 1 << 20  # of one message


class Link:
    """Lines of JSON over a socket that never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.rest = connection, b""

    def lines(self) -> list[bytes] | None:
        """Received lines; None if the other side has closed."""
        while True:
            try:
                data = self.connection.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                return None
            if not data or len(self.rest) > MOST_BYTES:
                return None
            self.rest += data
        *whole, self.rest = self.rest.split(b"\n")
        return whole

    def send(self, message: msgspec.Struct) -> bool:
        line = msgspec.json.encode(message) + b"\n"
        try:
            return self.connection.send(line) == len(line)
        except OSError:
            return False

    def close(self) -> None:
        self.connection.close()


class Door:
    """Listener of a watch for other nodes. A client without the secret occupies a thread but not the watch."""

    def __init__(self, folder: Path, host: str, authenticator: ClientAuthenticator) -> None:
        self.authenticator, self.admitted = authenticator, queue.SimpleQueue[socket.socket]()
        self.listener = _listener(folder, host)
        threading.Thread(target=self._accept, daemon=True).start()

    def let_in(self) -> list[socket.socket]:
        """Connections authenticated since the last call."""
        return [self.admitted.get() for _ in range(self.admitted.qsize())]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                if self.listener.fileno() < 0:
                    return  # closed on purpose
                time.sleep(ACCEPT_AGAIN_S)  # a caller that is gone, or no descriptor is free
                continue
            threading.Thread(target=self._ask, args=(connection,), daemon=True).start()

    def _ask(self, connection: socket.socket) -> None:
        if self.authenticator.admits(connection):
            self.admitted.put(connection)


def call(host: str, port: int, secret: Secret | None) -> Link:
    """A connection to the watch there, which has proved that it knows the secret."""
    connection = socket.create_connection((host, port), timeout=CALL_S)
    try:
        enter(connection, secret, CALL_S)
    except OSError:
        connection.close()
        raise
    return Link(connection)


def _listener(folder: Path, host: str) -> socket.socket:
    """Listen at the address of the previous watch if possible, because others know it."""
    path = folder / DOOR
    before = int(path.read_text().rpartition(":")[2]) if path.exists() else 0
    try:
        listener = socket.create_server((host, before), backlog=BACKLOG)
    except OSError:
        listener = socket.create_server((host, 0), backlog=BACKLOG)
    fresh = folder / f".{DOOR}"
    fresh.write_text(f"{host}:{listener.getsockname()[1]}")
    fresh.replace(path)
    return listener
