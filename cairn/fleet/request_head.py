"""Parsed request head, computed once for requests of a connection with equal heads."""

import msgspec

from cairn.fleet.paths import kind_of
from cairn.fleet.quota import digest_of


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """`lines` are the headers to pass on, as bytes."""

    method: bytes
    target: bytes
    lines: bytes
    sent: bytes  # to a server: all of the head but the values of its last lines, id and length
    computes: bool  # it makes a server compute
    generates: bool  # an answer of tokens
    streams: bool  # unless the body says no
    holder: str  # of its key, by the key's digest

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]


def request_head(method: bytes, target: bytes, lines: bytes) -> RequestHead:
    """Parse a head. HEAD is forwarded as GET, so that the framing of the response does not depend on the request."""
    asked = b"GET" if method == b"HEAD" else method
    sent = b"%b %b HTTP/1.1\r\n%bx-cairn-router: 1\r\nx-request-id: " % (asked, target, lines)
    return RequestHead(method, target, lines, sent, *kind_of(target), digest_of(lines))
