"""The router's side towards clients: requests in, answers out, one after the other on each connection.

    bytes --httptools--> HttpRequest --handle--> send(whole answer) | begin(stream), write(chunk) ..., finish()

A client that reads slowly stops the server's stream (`on_slow`), so it costs the memory of one buffer. A client that
leaves ends its request (`on_gone`). Knows no server.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import cast

import httptools
import msgspec

Headers = Sequence[tuple[bytes, bytes]]
OURS = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server")
)
STATUS = {status.value: status.phrase.encode() for status in HTTPStatus}
LARGEST_HEAD = 64 * 1024


class HttpRequest:
    __slots__ = ("body", "headers", "keep_alive", "method", "target")

    def __init__(self) -> None:
        self.method, self.target, self.body = b"", b"", b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.keep_alive = True

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]

    def header(self, wanted: bytes) -> bytes | None:
        for name, value in self.headers:
            if name == wanted:
                return value
        return None


Handle = Callable[["Front", HttpRequest], None]


class Front(asyncio.Protocol):
    def __init__(self, handle: Handle, largest_body: int) -> None:
        self._handle, self._largest = handle, largest_body
        self._parser = httptools.HttpRequestParser(self)
        self._request, self._parts, self._size = HttpRequest(), list[bytes](), 0
        self._waiting: deque[HttpRequest] = deque()  # sent before the answer to the one before
        self._busy = False
        self._keep_alive = True
        self.transport: asyncio.Transport | None = None
        self.on_gone: Callable[[], None] | None = None
        self.on_slow: Callable[[bool], None] | None = None

    # -- what comes in ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(400, "this is no HTTP request", "bad_request")

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        gone, self.on_gone = self.on_gone, None
        if gone is not None:
            gone()

    def pause_writing(self) -> None:
        if self.on_slow is not None:
            self.on_slow(True)

    def resume_writing(self) -> None:
        if self.on_slow is not None:
            self.on_slow(False)

    def on_message_begin(self) -> None:
        self._request, self._parts, self._size = HttpRequest(), [], 0

    def on_url(self, url: bytes) -> None:
        self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._request.headers.append((name.lower(), value))
        self._size += len(name) + len(value)
        if self._size > LARGEST_HEAD:
            self._refuse(431, "the headers are too large", "headers_too_large")

    def on_headers_complete(self) -> None:
        self._size = 0
        self._request.method = self._parser.get_method()
        if self._request.header(b"expect") is not None and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._size += len(body)
        if self._size > self._largest:
            self._refuse(413, f"the body is larger than {self._largest} bytes", "body_too_large")

    def on_message_complete(self) -> None:
        request = self._request
        request.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        request.keep_alive = self._parser.should_keep_alive()
        if self._busy:
            self._waiting.append(request)
        else:
            self._begin(request)

    def _begin(self, request: HttpRequest) -> None:
        self._busy, self._keep_alive = True, request.keep_alive
        self._handle(self, request)

    def _refuse(self, status: int, message: str, code: str) -> None:
        self._keep_alive = False
        self.send(status, *error_body(status, message, code))

    # -- what goes out ---------------------------------------------------------------------------

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer."""
        if self.transport is None:
            return
        length = b"content-length: %d\r\n" % len(body)
        self.transport.writelines([self._head(status, headers, length), body])
        self._over()

    def begin(self, status: int, headers: Headers) -> None:
        if self.transport is not None:
            self.transport.write(self._head(status, headers, b"transfer-encoding: chunked\r\n"))

    def write(self, chunk: bytes) -> None:
        if self.transport is not None and chunk:
            self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def finish(self) -> None:
        if self.transport is not None:
            self.transport.write(b"0\r\n\r\n")
            self._over()

    def _head(self, status: int, headers: Headers, framing: bytes) -> bytes:
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, STATUS.get(status, b""))]
        lines += [b"%b: %b\r\n" % pair for pair in headers if pair[0] not in OURS]
        if not self._keep_alive:
            lines.append(b"connection: close\r\n")
        return b"".join([*lines, framing, b"\r\n"])

    def _over(self) -> None:
        """The answer is out; the next request, if there is one."""
        self._busy, self.on_gone, self.on_slow = False, None, None
        if not self._keep_alive and self.transport is not None:
            self.transport.close()
        elif self._waiting:
            self._begin(self._waiting.popleft())


def error_body(status: int, message: str, code: str) -> tuple[Headers, bytes]:
    """An error of the router's own, in the form of OpenAI's."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    headers = [(b"content-type", b"application/json")]
    if status in (429, 503):
        headers.append((b"retry-after", b"1"))
    return headers, msgspec.json.encode(body)
