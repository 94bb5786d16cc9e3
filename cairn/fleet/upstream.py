"""Connections of the router to a server: one request at a time on each, kept open and used again, newest first.

    Pool.take(worker) -> Upstream --send(head, body)--> handler.head(), .chunk(), .end() | .lost(reason)

An answer in chunks is handed on chunk by chunk, each of them whole: what a server had half written when it died is
never seen. Anything else is handed on at its end. Knows HTTP's framing, nothing of what is inside.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from cairn.fleet.wire import NOT_ANSWERED, AnswerReader, lines_of, whole_chunk
from cairn.fleet.worker import Worker
from cairn.fleet.write_queue import WriteQueue

MOST_IDLE = 256  # connections kept to one server
CONNECT_S = 2.0
INTERIM = 200  # answers below are followed by another one


class AnswerHandler(Protocol):
    """Receiver of a server's response."""

    def head(self, status: int, lines: bytes) -> None:
        """`lines`: the headers to pass on."""
        ...

    def chunk(self, body: bytes) -> None: ...

    def end(self, body: bytes) -> None:
        """The answer is complete; `body` is all of it, if it did not come in chunks."""
        ...

    def lost(self, reason: str) -> None: ...


class Upstream(asyncio.Protocol):
    def __init__(self, worker: Worker, pool: "Pool") -> None:
        self.worker, self._pool = worker, pool
        self.handler: AnswerHandler | None = None
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answers = AnswerReader()
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._chunked = self._reading = False  # reading: the parser is in the middle of an answer
        self._between = False  # the parser has read a whole chunk, and waits for the next one
        # The handler, and the body that came; until what came with it is read, too.
        self._ended: tuple[AnswerHandler | None, bytes] | None = None
        self._reusable = True  # after this answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type

    def data_received(self, data: bytes) -> None:
        handler = self.handler
        if handler is None:  # the next request would take it for its answer
            self._lose("it sends what was not asked for")
            return
        if self._between:
            # The parser would call thrice for it.
            if (chunk := whole_chunk(data)) is not None:
                handler.chunk(chunk)
                return
        elif not self._reading and (answer := self._answers.read(data)) is not None:
            self.handler = None
            self._pool.give_back(self)
            handler.head(answer.status, answer.lines)
            handler.end(answer.body)
            return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        problem = ""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            problem = f"it does not speak HTTP: {error}"
        # The beginning of a chunk's size is no event.
        self._between = self._between and data.endswith(b"\r\n")
        if self._ended is not None:
            self._finish(self._reusable and not problem and not self._reading)
        elif problem:
            self._lose(problem)

    def _finish(self, reusable: bool) -> None:
        """The answer is complete. Not `reusable`: more came behind it, or the server has said so."""
        (handler, body), self._ended = self._ended or (None, b""), None
        if reusable:
            self._pool.give_back(self)
        elif self.transport is not None:
            self.transport.close()
        if handler is not None:
            handler.end(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(str(exc) if exc is not None else "the connection was closed")

    def send(self, handler: AnswerHandler, request: tuple[bytes, ...]) -> None:
        """`request`: in pieces, of which the last may be large."""
        self.handler = handler
        if self.transport is None or self.transport.is_closing():
            asyncio.get_running_loop().call_soon(self._lose, "the connection was closed")
        else:
            self._pool.writes.write(self.transport, request)

    def drop(self) -> None:
        """The answer is not read any more: the server sees that, and stops."""
        self.handler = None
        if self.transport is not None:
            self.transport.abort()

    def _lose(self, reason: str) -> None:
        handler, self.handler = self.handler, None
        self._pool.discard(self)
        if self.transport is not None:
            self.transport.abort()
        if handler is not None:
            handler.lost(reason)

    # -- of the parser ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._reading, self._headers, self._parts, self._chunked = True, [], [], False
        self._between = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._chunked = self._chunked or name == b"transfer-encoding"
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.handler is not None and status >= INTERIM:
            self.handler.head(status, lines_of(self._headers, NOT_ANSWERED))

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True
        if self._parts:
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            if self.handler is not None:
                self.handler.chunk(body)

    def on_message_complete(self) -> None:
        self._reading = self._between = False
        if self._parser.get_status_code() >= INTERIM and self._ended is None:
            body = b"" if self._chunked else b"".join(self._parts)
            self._ended, self.handler = (self.handler, body), None
            self._reusable = self._parser.should_keep_alive()
        elif self._ended is not None:
            self._reusable = False


class Pool:
    """Idle connections, by server."""

    def __init__(self, writes: WriteQueue) -> None:
        self.writes = writes
        self._idle: dict[str, list[Upstream]] = {}  # by url: numbers are given again

    def take(self, worker: Worker) -> Upstream | None:
        """An open connection that is not in use."""
        idle = self._idle.get(worker.url, ())
        while idle:
            upstream = idle.pop()
            if upstream.transport is not None and not upstream.transport.is_closing():
                return upstream
        return None

    async def connect(self, worker: Worker, ready: Callable[[Upstream | None, str], None]) -> None:
        """A new one; `ready` is called with it, or with the reason why there is none."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, upstream = await loop.create_connection(
                    lambda: Upstream(worker, self), worker.host, worker.port
                )
        except (OSError, TimeoutError) as error:
            ready(None, str(error) or "no connection in time")
            return
        ready(upstream, "")

    def give_back(self, upstream: Upstream) -> None:
        url = upstream.worker.url
        idle = self._idle.get(url)
        if idle is None:
            idle = self._idle[url] = []
        if len(idle) < MOST_IDLE:
            idle.append(upstream)
        elif upstream.transport is not None:
            upstream.transport.close()

    def discard(self, upstream: Upstream) -> None:
        idle = self._idle.get(upstream.worker.url, [])
        if upstream in idle:
            idle.remove(upstream)

    def close(self) -> None:
        for url in list(self._idle):
            self.forget(url)

    def forget(self, url: str) -> None:
        """A server that is used no more."""
        for upstream in self._idle.pop(url, ()):
            if upstream.transport is not None:
                upstream.transport.close()
