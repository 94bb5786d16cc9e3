"""Incremental reader of an HTTP/1.1 response and of its server-sent events.

    bytes of the socket --Response.feed--> pieces of the body --Events.feed--> the data of each server-sent event

Written for a load generator: it costs little per token, and stays right wherever the network cuts the bytes. Reads
bodies in chunks, of a stated length, and up to the end of the connection. Sans-I/O: no socket, no clock.
"""

import httptools

from cairn.core.errors import CairnError

LARGEST_HEAD = 64 * 1024
LARGEST_EVENT = 16 * 1024 * 1024


class ProtocolError(CairnError):
    """The other side does not speak HTTP/1.1, or not as we know it."""


class HttpResponse:
    """A response parsed by httptools. `status` is 0 until the head has arrived."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._keep_alive = False
        self._pieces: list[bytes] = []

    @property
    def reusable(self) -> bool:
        """Return whether the connection can be used for another request."""
        return self.done and self._framed and self._keep_alive

    @property
    def _framed(self) -> bool:
        """Return whether the response states its length; otherwise it ends with the connection."""
        if "transfer-encoding" in self.headers or "content-length" in self.headers:
            return True
        return self.status in (204, 304)

    def feed(self, data: bytes) -> list[bytes]:
        """The pieces of the body in `data`; raises ProtocolError on what is no HTTP."""
        if self.done or not data:
            return []
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.done:
                raise ProtocolError(f"the answer is no HTTP/1.1: {error}") from None
        self._head_bytes += 0 if self.status else len(data)
        if self._head_bytes > LARGEST_HEAD:
            raise ProtocolError(f"a head of more than {LARGEST_HEAD} bytes")
        pieces, self._pieces = self._pieces, []
        return pieces

    def end(self) -> bool:
        """The connection has been closed. Whether the response is whole."""
        self.done = self.done or (self.status > 0 and not self._framed)
        return self.done

    # -- what httptools calls ------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.done:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()  # "go on"; the real one follows
        elif not self.done:
            self.status, self._keep_alive = status, self._parser.should_keep_alive()

    def on_body(self, piece: bytes) -> None:
        if not self.done:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        self.done = self.status > 0


class EventReader:
    """The `data:` of server-sent events; comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = self._rest + data
        half = b""
        if b"\r" in data:
            # A line end may be cut between its two characters: the first one waits for the second.
            half = b"\r" if data.endswith(b"\r") else b""
            data = data[: len(data) - len(half)].replace(b"\r\n", b"\n")
        *whole, rest = data.split(b"\n\n")
        self._rest = rest + half
        if len(self._rest) > LARGEST_EVENT:
            raise ProtocolError(f"an event of more than {LARGEST_EVENT} bytes")
        return [found for event in whole if (found := _data(event))]


def _data(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly always
        return event[6:]
    values = [
        line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")
    ]
    return b"\n".join(values)
