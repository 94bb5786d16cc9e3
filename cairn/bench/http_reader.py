"""What does an HTTP/1.1 server say, piece by piece? A reader of one response and of the events in it.

    bytes of the socket --Response.feed--> pieces of the body --Events.feed--> the data of each server-sent event

Written for a load generator: it has to cost little per token, and to stay right wherever the network cuts the bytes.
Reads bodies in chunks, of a stated length, and up to the end of the connection. Sans-I/O: no socket, no clock.
"""

from cairn.core.errors import CairnError

LARGEST_HEAD = 64 * 1024
LARGEST_EVENT = 16 * 1024 * 1024


class ProtocolError(CairnError):
    """The other side does not speak HTTP/1.1, or not as we know it."""


class Response:
    """One response, from its first byte to its last. `status` is 0 until the head is there."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._rest = b""  # not yet understood
        self._left: int | None = None  # bytes of the body or of the chunk that are still to come
        self._chunked = False
        self._trailer = False  # after the last chunk

    @property
    def reusable(self) -> bool:
        """Whether another request can go down the same connection."""
        whole = self._chunked or "content-length" in self.headers
        return self.done and whole and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> list[bytes]:
        """The pieces of the body in `data`; raises ProtocolError on what is no HTTP."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        if not self.status:
            body = self._head(data)
            if body is None:
                return []
            data = body
        if self.done or not data:
            return []
        return self._chunks(data) if self._chunked else self._plain(data)

    def end(self) -> bool:
        """The connection has been closed. Whether the response is whole."""
        if self.status and not self._chunked and self._left is None:
            self.done = True  # it said that it would end like this
        return self.done

    def _head(self, data: bytes) -> bytes | None:
        """What follows the head, or None while it is not complete."""
        while True:
            at = data.find(b"\r\n\r\n")
            if at < 0:
                if len(data) > LARGEST_HEAD:
                    raise ProtocolError(f"a head of more than {LARGEST_HEAD} bytes")
                self._rest = data
                return None
            head, data = data[:at].decode("latin-1"), data[at + 4 :]
            first, *lines = head.split("\r\n")
            words = first.split(" ", 2)
            if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
                raise ProtocolError(f"the answer is no HTTP/1.1: it begins with {first[:60]!r}")
            if 100 <= int(words[1]) < 200:
                continue  # "go on"; the real one follows
            break
        self.status = int(words[1])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._framing()
        return data

    def _framing(self) -> None:
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._chunked = True
        elif "content-length" in self.headers:
            length = self.headers["content-length"]
            if not length.isdecimal():
                raise ProtocolError(f"content-length is '{length}'")
            self._left = int(length)
            self.done = self._left == 0
        elif self.status in (204, 304):
            self.done = True

    def _plain(self, data: bytes) -> list[bytes]:
        if self._left is None:
            return [data]
        data = data[: self._left]
        self._left -= len(data)
        self.done = self._left == 0
        return [data]

    def _chunks(self, data: bytes) -> list[bytes]:
        """SIZE\\r\\n BYTES \\r\\n ... 0\\r\\n \\r\\n, cut anywhere; `_left` includes the line end of a chunk."""
        pieces = []
        at = 0
        while at < len(data) and not self.done:
            if self._left:
                taken = data[at : at + self._left]
                body = min(len(taken), self._left - 2)
                if body > 0:
                    pieces.append(taken[:body])
                self._left -= len(taken)
                at += len(taken)
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._rest = data[at:]
                if len(self._rest) > LARGEST_HEAD:
                    raise ProtocolError("a chunk without a size")
                break
            self._line(data[at:end])
            at = end + 2
        return pieces

    def _line(self, line: bytes) -> None:
        if self._trailer:
            self.done = not line
            return
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            raise ProtocolError(f"a chunk of {line[:40]!r} bytes") from None
        if size:
            self._left = size + 2
        else:
            self._trailer = True


class Events:
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
