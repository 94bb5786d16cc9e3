"""Addresses that clients connect to: those that cannot be listened on are refused with a reason."""

import asyncio
import errno
import os
import re
import socket
from typing import Any

from cairn.core.errors import ConfigError
from cairn.fleet.config import MOST_PORT

ADDRESS = re.compile(r"(\[[^\s\]]+\]|[^\s:\[\]]+):(\d{1,5})")
WILDCARDS = ("0.0.0.0", "::", "")
UNREAD_S = 45.0
HINTS = {
    errno.EADDRINUSE: "another program listens there; choose another port, or 0 for a free one",
    errno.EACCES: "ports below 1024 need privileges; choose another port",
}


def drop_who_does_not_read(listening: asyncio.Server) -> None:
    """Ends connections that were accepted here whose client takes nothing for so long (Linux).

    A server would end its own one after a minute, and the request would be computed again elsewhere, in vain.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        for one in listening.sockets:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000))


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    number = error.errno or 0
    hint = HINTS.get(number, "name an address of this machine, such as 127.0.0.1")
    # The event loop writes the address into the reason; a name that is not known has a negative number.
    reason = os.strerror(number) if number > 0 else error.strerror or str(error)
    return ConfigError(f"cannot listen on {host}:{port}: {reason}", hint=hint)


def check_port(host: str, port: int) -> None:
    """Refuse a port that another program listens on, before something is started that needs it."""
    if not port:
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            trial.bind(address)
    except OSError as error:
        raise cannot_listen(host, port, error) from None


def check_address(name: str, text: str) -> None:
    """`name`: of the flag. gRPC itself takes a port that is too large for another one."""
    found = ADDRESS.fullmatch(text)
    if found is None or int(found[2]) > MOST_PORT:
        raise ConfigError(f"{name} is {text!r}", hint="it has to be HOST:PORT, as in 0.0.0.0:9000")


def is_wildcard(host: str) -> bool:
    """Return whether the host means all addresses of this machine."""
    return host in WILDCARDS


def listen_grpc(server: Any, address: str) -> int:
    """The port that a gRPC server has got. Its types are not installed everywhere."""
    try:
        return server.add_insecure_port(address)
    except RuntimeError:
        raise ConfigError(
            f"cannot listen on {address}", hint="another program may, or the host is not this one"
        ) from None
