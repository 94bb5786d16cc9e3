"""The router's side towards clients: requests in, answers out, one after the other on each connection.

    bytes --wire, httptools--> HttpRequest --handle--> send(whole answer) | begin(stream), write(chunk) ..., finish()

A client that reads slowly stops the server's stream (`Asker.slow`), so it costs the memory of one buffer. A client that
leaves ends its request (`Asker.gone`), and one that sends half of a request is told so in time. Knows no server.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol, cast

import httptools
import msgspec

from cairn.fleet.request_head import request_head
from cairn.fleet.wire import (
    ID,
    LARGEST_HEAD,
    NOT_SENT,
    HttpRequest,
    RequestReader,
    chunk_of,
    lines_of,
    without_upgrade,
)
from cairn.fleet.write_queue import WriteQueue

STATUS = {code: b"HTTP/1.1 %d \r\n" % code for code in range(1000)}
STATUS |= {code: b"HTTP/1.1 %d %b\r\n" % (code, code.phrase.encode()) for code in HTTPStatus}

END_OF_HEAD, CLOSE = b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"
LENGTH = b"content-length: "
CHUNKED, LAST_CHUNK = b"transfer-encoding: chunked", b"0\r\n\r\n"
UNFRAMED = b"cache-control: no-store"  # something has to stand in the place of the other
HEAD_S = 30.0  # in which the headers of a request are here
BODY_S = 60.0  # without a byte of a body, after which no more is awaited
MOST_WAITING = 16  # requests of a connection, after which no more are read
JSON = b"content-type: application/json\r\n"
Handle = Callable[["Front", HttpRequest], None]


class Asker(Protocol):
    """A request that waits for its answer."""

    def gone(self) -> None:
        """Its client has left."""
        ...

    def slow(self, slow: bool) -> None:
        """Its client does not read, or reads again."""
        ...


class Front(asyncio.Protocol):
    def __init__(self, handle: Handle, largest_body: int, writes: WriteQueue) -> None:
        self._handle, self._largest, self._writes = handle, largest_body, writes
        self._reader = RequestReader()
        self._parser = httptools.HttpRequestParser(self)
        self._reading = False  # the parser is in the middle of a request
        self._in_body = False  # of it
        self._due = 0.0  # until then its next part is awaited
        self._watch: asyncio.TimerHandle | None = None
        self._target, self._headers = b"", list[tuple[bytes, bytes]]()
        self._parts, self._size = list[bytes](), 0
        self._waiting: deque[HttpRequest] = deque()  # sent before the answer to the one before
        self._busy = self._refused = False  # refused: whatever else comes is not read
        self._going_on = False  # those that wait are being handled
        self._keep_alive = True
        # Of the request that is answered: the version of its HTTP; does it ask for the head of the answer alone?
        self._version, self._head_only = "1.1", False
        self._written: Callable[[bytes], bytes] = (
            chunk_of  # a piece of a stream, as its client reads it
        )
        self._last = LAST_CHUNK
        self.transport: asyncio.Transport | None = None
        self.asker: Asker | None = None  # whose answer is awaited

    # -- what comes in ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type

    def data_received(self, data: bytes) -> None:
        if not self._reading and len(data) <= self._largest:
            request = self._reader.read(data)
            if request is not None:
                self._came(request)
                return
        try:
            self._parser.feed_data(data if self._reading else without_upgrade(data))
        except httptools.HttpParserError:
            self._refuse(400, "this is no HTTP request", "bad_request")
        except httptools.HttpParserUpgrade:
            self._refuse(400, "the connection cannot be upgraded or be a tunnel", "no_upgrade")
        if self._reading and self._in_body:
            self._due = asyncio.get_running_loop().time() + BODY_S

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._watch is not None:
            self._watch.cancel()
        asker, self.asker = self.asker, None
        if asker is not None:
            asker.gone()

    def pause_writing(self) -> None:
        if self.asker is not None:
            self.asker.slow(True)

    def resume_writing(self) -> None:
        if self.asker is not None:
            self.asker.slow(False)

    def on_message_begin(self) -> None:
        self._reading, self._target, self._headers, self._parts, self._size = True, b"", [], [], 0
        self._in_body = False
        self._due = asyncio.get_running_loop().time() + HEAD_S
        if self._watch is None:
            self._look()

    def _look(self) -> None:
        """Is the rest of a request overdue? Otherwise again when it would be: a timer for many parts."""
        self._watch = None
        if not self._reading or self.transport is None or self._refused:
            return
        loop = asyncio.get_running_loop()
        if self._busy:  # with the answer before it, which is not cut short
            self._due = loop.time() + HEAD_S
        if self._due > loop.time():
            self._watch = loop.call_at(self._due, self._look)
        else:
            self._refuse(408, "the rest of the request did not come in time", "request_timeout")

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))
        self._size += len(name) + len(value)
        if self._size > LARGEST_HEAD:
            self._refuse(431, "the headers are too large", "headers_too_large")

    def on_headers_complete(self) -> None:
        self._size, self._in_body = 0, True
        if any(name == b"expect" for name, _ in self._headers) and self.transport is not None:
            self._writes.write(self.transport, (b"HTTP/1.1 100 Continue\r\n\r\n",))

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._size += len(body)
        if self._size > self._largest:
            self._refuse(413, f"the body is larger than {self._largest} bytes", "body_too_large")

    def on_message_complete(self) -> None:
        self._reading = False
        if self._parser.should_upgrade():  # it has not read the body
            return
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        given = next((value for name, value in self._headers if name == ID), None)
        lines = lines_of(self._headers, NOT_SENT)
        head = request_head(self._parser.get_method(), self._target, lines)
        request = HttpRequest(head, body, given)
        request.keep_alive = self._parser.should_keep_alive()
        request.version = self._parser.get_http_version()
        self._came(request)

    def _came(self, request: HttpRequest) -> None:
        if self._refused:
            return
        if self._busy:
            self._waiting.append(request)
            if len(self._waiting) == MOST_WAITING and self.transport is not None:
                self.transport.pause_reading()
        else:
            self._busy, self._keep_alive = True, request.keep_alive
            self._version, self._head_only = request.version, request.head.method == b"HEAD"
            self._handle(self, request)

    def _refuse(self, status: int, message: str, code: str) -> None:
        """The last that is said here. In the middle of an answer there is no room for a word: both end."""
        if self._refused:
            return
        self._refused, self._keep_alive = True, False
        asker, self.asker = self.asker, None
        if asker is not None:
            asker.gone()
        if not self._busy:
            self.send(status, *error_body(status, message, code))
        elif self.transport is not None:
            self.transport.abort()

    # -- what goes out ---------------------------------------------------------------------------

    def send(self, status: int, lines: bytes, body: bytes, id: bytes = b"") -> None:
        """A whole answer. `lines` are its headers; `id` a last one, up to its line's end."""
        if (transport := self.transport) is not None:
            ends = END_OF_HEAD if self._keep_alive else CLOSE
            size = b"%d" % len(body)
            rest = b"" if self._head_only else body
            parts = (STATUS[status], lines, id, LENGTH, size, ends, rest)
            self._writes.write(transport, parts)
            self._over()

    def begin(self, status: int, lines: bytes, chunk: bytes) -> None:
        """A stream, with its first chunk. A client of HTTP/1.0 knows no chunks: its stream ends with the connection."""
        self._written, last, framing = chunk_of, LAST_CHUNK, CHUNKED
        if self._version == "1.0":
            self._written, last, framing = bytes, b"", UNFRAMED
            self._keep_alive = False
        if self._head_only:
            self._written, last = _nothing, b""
        self._last = last
        if self.transport is not None:
            ends = END_OF_HEAD if self._keep_alive else CLOSE
            head = b"%b%b%b" % (STATUS[status], lines, framing)
            piece = self._written(chunk) if chunk else b""
            self._writes.write(self.transport, (head, ends, piece))

    def write(self, chunk: bytes) -> None:
        if self.transport is not None and chunk:  # an empty one would end the answer
            self._writes.write_piece(self.transport, self._written(chunk))

    def finish(self) -> None:
        if self.transport is not None:
            self._writes.write_piece(self.transport, self._last)
            self._over()

    def _over(self) -> None:
        """The answer is out; the next request, if there is one."""
        self._busy, self.asker = False, None
        if not self._keep_alive and self.transport is not None:
            self._writes.flush()
            self.transport.close()
        elif self._waiting and not self._going_on:
            self._go_on()

    def _go_on(self) -> None:
        """Those that wait, up to one whose answer has to be awaited. A loop: the router's own answers come at once."""
        self._going_on, waiting = True, self._waiting
        while waiting and not self._busy and self._keep_alive and self.transport is not None:
            self._came(waiting.popleft())
        self._going_on, transport = False, self.transport
        if len(waiting) < MOST_WAITING and transport is not None and not transport.is_closing():
            transport.resume_reading()


def _nothing(chunk: bytes) -> bytes:
    return b""


def error_body(status: int, message: str, code: str) -> tuple[bytes, bytes]:
    """An error of the router's own, in the form of OpenAI's: its headers and its body."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    lines = JSON + b"retry-after: 1\r\n" if status in (429, 503) else JSON
    return lines, msgspec.json.encode(body)
