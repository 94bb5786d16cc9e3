"""Address of the server that a URL names. Invalid URLs raise before a connection is tried."""

from typing import NamedTuple
from urllib.parse import urlsplit

from cairn.core.errors import UsageError


class ServerAddress(NamedTuple):
    host: str
    port: int
    tls: bool
    prefix: str  # of every path


def place(url: str) -> ServerAddress:
    try:
        if not url.isprintable() or " " in url:
            raise ValueError
        parts = urlsplit(url)  # ValueError: an open bracket
        port = parts.port  # ValueError: no number
        host = parts.hostname or ""
        host.encode("idna")  # UnicodeError, which is one: an empty or overlong part of a name
    except ValueError:
        host, port, parts = "", None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"'{url}' is no address of a server", hint="such as http://127.0.0.1:8000")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")  # people paste a base_url, too
    return ServerAddress(host, port or (443 if tls else 80), tls, prefix)
