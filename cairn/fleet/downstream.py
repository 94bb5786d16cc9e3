"""The router's side towards clients: requests in, answers out, one after the other on each connection.

    bytes --wire, httptools--> HttpRequest --handle--> send(whole answer) | begin(stream), write(chunk) ..., finish()

A client that reads slowly pauses the server's stream (`PendingRequest.pause`), so it costs the memory of one buffer. A
client that leaves ends its request (`PendingRequest.client_left`). One that sends half of a request gets a 408 in time.
Knows no server.
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
UNFRAMED = b"cache-control: no-store"  # in the place of CHUNKED, which ends the head
HEAD_S = 30.0  # in which the headers of a request have to come
BODY_S = 60.0  # that a body may make no progress
MOST_PIPELINED = 16  # requests of a connection, after which no more are read
JSON = b"content-type: application/json\r\n"
Handle = Callable[["Downstream", HttpRequest], None]


class PendingRequest(Protocol):
    """A request that waits for its answer."""

    def client_left(self) -> None:
        """Its client has left."""
        ...

    def pause(self, paused: bool) -> None:
        """Its client does not read, or reads again."""
        ...


class Downstream(asyncio.Protocol):
    def __init__(self, handle: Handle, largest_body: int, writes: WriteQueue) -> None:
        self._handle, self._largest, self._writes = handle, largest_body, writes
        self._reader = RequestReader()
        self._parser = httptools.HttpRequestParser(self)
        self._reading = False  # the parser is in the middle of a request
        self._in_body = False  # of it
        self._deadline_s = 0.0  # by which its next part has to come
        self._timer: asyncio.TimerHandle | None = None
        self._target, self._headers = b"", list[tuple[bytes, bytes]]()
        self._parts, self._size = list[bytes](), 0
        self._pipelined = deque[HttpRequest]()  # that came before the answer to the one before
        self._busy = False  # a request is being answered
        self._refused = False  # nothing that comes is read any more
        self._emptying = False  # the pipelined requests are being handled
        self._keep_alive = True
        # Of the request that is answered: the version of its HTTP; does it ask for the head of the answer alone?
        self._version, self._head_only = "1.1", False
        self._frame: Callable[[bytes], bytes] = chunk_of  # of a piece of a stream
        self._last_frame = LAST_CHUNK
        self.transport: asyncio.Transport | None = None
        self.pending: PendingRequest | None = None  # whose answer is awaited

    # -- what comes in ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type

    def data_received(self, data: bytes) -> None:
        if not self._reading and len(data) <= self._largest:
            request = self._reader.read(data)
            if request is not None:
                self._answer_or_queue(request)
                return
        try:
            self._parser.feed_data(data if self._reading else without_upgrade(data))
        except httptools.HttpParserError:
            self._refuse(400, "this is no HTTP request", "bad_request")
        except httptools.HttpParserUpgrade:
            self._refuse(400, "the connection cannot be upgraded or be a tunnel", "no_upgrade")
        if self._reading and self._in_body:
            self._deadline_s = asyncio.get_running_loop().time() + BODY_S

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._timer is not None:
            self._timer.cancel()
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.client_left()

    def pause_writing(self) -> None:
        if self.pending is not None:
            self.pending.pause(True)

    def resume_writing(self) -> None:
        if self.pending is not None:
            self.pending.pause(False)

    def on_message_begin(self) -> None:
        self._reading, self._target, self._headers, self._parts, self._size = True, b"", [], [], 0
        self._in_body = False
        self._deadline_s = asyncio.get_running_loop().time() + HEAD_S
        if self._timer is None:
            self._check_deadline()

    def _check_deadline(self) -> None:
        """Refuses a request whose rest is overdue; otherwise looks again at the deadline: one timer for many parts."""
        self._timer = None
        if not self._reading or self.transport is None or self._refused:
            return
        loop = asyncio.get_running_loop()
        if self._busy:  # with the answer before it, which is not cut short
            self._deadline_s = loop.time() + HEAD_S
        if self._deadline_s > loop.time():
            self._timer = loop.call_at(self._deadline_s, self._check_deadline)
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
        id = next((value for name, value in self._headers if name == ID), None)
        lines = lines_of(self._headers, NOT_SENT)
        head = request_head(self._parser.get_method(), self._target, lines)
        request = HttpRequest(head, body, id)
        request.keep_alive = self._parser.should_keep_alive()
        request.version = self._parser.get_http_version()
        self._answer_or_queue(request)

    def _answer_or_queue(self, request: HttpRequest) -> None:
        if self._refused:
            return
        if self._busy:
            self._pipelined.append(request)
            if len(self._pipelined) == MOST_PIPELINED and self.transport is not None:
                self.transport.pause_reading()
        else:
            self._busy, self._keep_alive = True, request.keep_alive
            self._version, self._head_only = request.version, request.head.method == b"HEAD"
            self._handle(self, request)

    def _refuse(self, status: int, message: str, code: str) -> None:
        """The last answer of this connection. In the middle of another answer there is no place for it: both end."""
        if self._refused:
            return
        self._refused, self._keep_alive = True, False
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.client_left()
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
            self._answer_sent()

    def begin(self, status: int, lines: bytes, chunk: bytes) -> None:
        """A stream, with its first chunk. A client of HTTP/1.0 knows no chunks: its stream ends with the connection."""
        self._frame, last, framing = chunk_of, LAST_CHUNK, CHUNKED
        if self._version == "1.0":
            self._frame, last, framing = bytes, b"", UNFRAMED
            self._keep_alive = False
        if self._head_only:
            self._frame, last = _no_body, b""
        self._last_frame = last
        if self.transport is not None:
            ends = END_OF_HEAD if self._keep_alive else CLOSE
            head = b"%b%b%b" % (STATUS[status], lines, framing)
            piece = self._frame(chunk) if chunk else b""
            self._writes.write(self.transport, (head, ends, piece))

    def write(self, chunk: bytes) -> None:
        if self.transport is not None and chunk:  # an empty one would end the answer
            self._writes.write_piece(self.transport, self._frame(chunk))

    def finish(self) -> None:
        if self.transport is not None:
            self._writes.write_piece(self.transport, self._last_frame)
            self._answer_sent()

    def _answer_sent(self) -> None:
        """The answer is complete: close, or go on with the next pipelined request."""
        self._busy, self.pending = False, None
        if not self._keep_alive and self.transport is not None:
            self._writes.flush()
            self.transport.close()
        elif self._pipelined and not self._emptying:
            self._answer_pipelined()

    def _answer_pipelined(self) -> None:
        """Pipelined requests, up to one that a server answers. A loop: the router's own answers come at once."""
        self._emptying, pipelined = True, self._pipelined
        while pipelined and not self._busy and self._keep_alive and self.transport is not None:
            self._answer_or_queue(pipelined.popleft())
        self._emptying, transport = False, self.transport
        if len(pipelined) < MOST_PIPELINED and transport is not None and not transport.is_closing():
            transport.resume_reading()


def _no_body(chunk: bytes) -> bytes:
    return b""


def error_body(status: int, message: str, code: str) -> tuple[bytes, bytes]:
    """An error of the router's own, in the form of OpenAI's: its headers and its body."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    lines = JSON + b"retry-after: 1\r\n" if status in (429, 503) else JSON
    return lines, msgspec.json.encode(body)
