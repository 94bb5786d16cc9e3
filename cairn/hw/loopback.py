"""Latency of a message to another process of this machine over TCP.

The parent listens on a free port of 127.0.0.1 and starts this very file as a child, which echoes
small messages and then sends large blocks. Two processes, because two threads of one Python would
share its lock. Standard library only, so that the child starts at once.
"""

import os
import socket
import struct
import subprocess
import sys
import time
from typing import NamedTuple

MESSAGE_BYTES = 64
BLOCK_BYTES = 8 << 20
PATIENCE_S = 20


class Trip(NamedTuple):
    round_trips_s: list[float]
    blocks_s: list[float]  # to receive one block
    block_bytes: int


def travel(rounds: int, size_bytes: int) -> Trip:
    """Measure `rounds` echoes, then the arrival of about `size_bytes` in blocks."""
    blocks = max(2, size_bytes // BLOCK_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        port = server.getsockname()[1]
        # -P: the folder of this file is not a place to import modules from.
        command = [sys.executable, "-P", __file__, str(port), str(rounds), str(blocks)]
        with subprocess.Popen(command) as child:
            try:
                connection, _ = server.accept()
                with connection:
                    _prepare(connection)
                    return _measure(connection, rounds, blocks)
            finally:
                child.kill()


def _measure(connection: socket.socket, rounds: int, blocks: int) -> Trip:
    message, block = bytearray(os.urandom(MESSAGE_BYTES)), bytearray(BLOCK_BYTES)
    round_trips = []
    for _ in range(rounds):
        start = time.perf_counter()
        connection.sendall(message)
        _fill(message, connection)
        round_trips.append(time.perf_counter() - start)
    arrivals = []
    _fill(block, connection)  # the window opens
    for _ in range(blocks - 1):
        start = time.perf_counter()
        _fill(block, connection)
        arrivals.append(time.perf_counter() - start)
    return Trip(round_trips, arrivals, BLOCK_BYTES)


def _answer(port: int, rounds: int, blocks: int) -> None:
    """The child's side."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.settimeout(None)
        _prepare(connection)
        message, block = bytearray(MESSAGE_BYTES), os.urandom(BLOCK_BYTES)
        for _ in range(rounds):
            _fill(message, connection)
            connection.sendall(message)
        for _ in range(blocks):
            connection.sendall(block)


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The kernel's own timeout: Python's would add a poll to every call, and we time those calls.
    patience = struct.pack("ll", PATIENCE_S, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)


def _fill(buffer: bytearray, connection: socket.socket) -> None:
    """Receive exactly as much as the buffer holds. It is reused: fresh memory would cost faults."""
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("the other process closed the connection")
        view = view[count:]


if __name__ == "__main__":
    _answer(*map(int, sys.argv[1:4]))
