"""Sockets of a transfer end before the first frame: where it listens, how another one is reached.

    bound(family, ...)  ->  a listener          dialled(family, ...)  ->  a connection whose other end knows the secret

Unix sockets have abstract names; TCP off loopback asks for a secret. Knows nothing of frames, regions or peers.
"""

import contextlib
import os
import socket

from cairn.comm.transfer.errors import TransferError
from cairn.core.shared_secret import Secret, check_open, enter, is_loopback

AT_ONCE = 4 << 20  # bytes that may be on their way to a reader that is busy
CONNECT_S = 10.0  # for a connection, and for each end to introduce itself


def bound(
    family: socket.AddressFamily, name: str, where: tuple[str, int], secret: Secret | None
) -> socket.socket:
    """`where` counts for TCP only; so does the secret, which a listener off loopback needs."""
    if family == socket.AF_UNIX:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # An abstract name: no file that a killed process could leave behind.
        listener.bind(f"\0cairn-{os.getpid()}-{name[:40]}-{id(listener):x}")
        listener.listen()
        return listener
    check_open(where[0], secret, f"the transfer end {name!r}")
    try:
        return socket.create_server(where, backlog=64)
    except OSError as error:
        raise TransferError(
            f"cannot listen on {where[0]}:{where[1]}: {error.strerror or error}",
            hint="use port 0 for any free one",
        ) from None


def name_of(listener: socket.socket) -> str:
    """The address for `dialled`."""
    if listener.family == socket.AF_UNIX:
        return listener.getsockname()[1:].decode()
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"


def dialled(family: socket.AddressFamily, where: str, secret: Secret | None) -> socket.socket:
    if family == socket.AF_UNIX:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(f"\0{where}")
        return connection
    host, _, port = where.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=CONNECT_S)
    tune_for_bulk(connection, host)
    try:
        enter(connection, secret, CONNECT_S)
    except BaseException:
        connection.close()
        raise
    return connection


def tune_for_bulk(link: socket.socket, host: str) -> None:
    """Settings for a connection that carries hundreds of megabytes; of a listener, for all that it accepts.

    Each setting only saves time, so a kernel that refuses one is left to its own.
    """
    with contextlib.suppress(OSError):
        # A short answer must not wait for the acknowledgement of the one before.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel makes room for as much as one says one waits for, and still finds the best size by itself, which
        # asking for a size (SO_RCVBUF) would end. No read waits for that much: the room stays, the mark goes.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, AT_ONCE)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if is_loopback(
            host
        ):  # nothing there is congested: pacing (BBR) would be timers for nothing
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
