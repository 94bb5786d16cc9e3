"""Sends requests to any OpenAI-compatible server and writes down when each token came.

    Ask --prepare--> bytes --send--> one connection per request in flight, kept for the next --> Record

Talks HTTP/1.1 over asyncio and httptools (`http_reader`): some microseconds per token, so that the client is not what
gets measured. Nothing is sent twice, and nothing that a server does raises: an error becomes a Record of its
kind. Knows nothing about rates and statistics.
"""

import asyncio
import errno
import ssl
from typing import Any, Literal, NamedTuple, cast

import msgspec

from cairn.bench.http_reader import EventReader, HttpResponse, ProtocolError
from cairn.bench.load_answer import LoadAnswer, RequestRecord, error_text
from cairn.bench.load_prompts import LoadRequest
from cairn.core.server_address import place

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
IDLE_S = 2.0  # a connection that has been idle for longer may be about to be closed by its server (uvicorn: after 5)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The server and endpoint under test."""

    url: str
    model: str = ""
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: dict[str, Any] = {}  # more fields for the body
    timeout_s: float = 600.0


class PreparedRequest(NamedTuple):
    """A request as it goes over the wire."""

    wire: bytes
    asked_tokens: int


class Connection(asyncio.Protocol):
    """Connection for one request at a time; each piece is timestamped on arrival."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._clock = loop.time
        self._transport: asyncio.Transport | None = None
        self._finished: asyncio.Future[None] | None = None
        self.closed = False
        self.idle_since_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self.response = HttpResponse()
        self.answer = LoadAnswer()
        self.body: list[bytes] = []  # of what is no stream
        self._events: EventReader | None = None

    def begin(self, wire: bytes) -> "asyncio.Future[None]":
        """Sends a request; the future is done when its answer is, in whichever way."""
        self._reset()
        self._finished = self._loop.create_future()
        if self._transport is None or self.closed:
            self.connection_lost(None)
        else:
            self._transport.write(wire)
        return self._finished

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        if self._finished is None or self._finished.done():
            self.close()  # bytes that were not asked for
            return
        response = self.response
        try:
            for piece in response.feed(data):
                self._take(piece, now)
        except ProtocolError as error:
            self.answer.error = ("bad answer", error.message)
            self._finish()
            self.close()
        if response.done:
            self._finish()

    def _take(self, piece: bytes, now: float) -> None:
        if self._events is None:
            if self.body or not _is_stream(self.response):
                self.body.append(piece)
                return
            self._events = EventReader()
        for event in self._events.feed(piece):
            self.answer.take(event, now)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self.response.end() and self.answer.error is None:
            self.answer.error = ("closed", str(exc or "by the server"))
        self._finish()

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _finish(self) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)


def _is_stream(response: HttpResponse) -> bool:
    kind = response.headers.get("content-type", "")
    return response.status == 200 and kind.startswith("text/event-stream")


class LoadClient:
    """Connections to one server. Use as `async with LoadClient(target) as client`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.place = place(target.url)
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._tls = ssl.create_default_context() if self.place.tls else None

    async def __aenter__(self) -> "LoadClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()
        await asyncio.sleep(0)  # the transports close in the next turn of the loop

    def prepare(self, ask: LoadRequest) -> PreparedRequest:
        target = self.target
        body: dict[str, Any] = {
            "model": target.model,
            "max_tokens": ask.output_tokens,
            "temperature": target.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        else:
            body["prompt"] = ask.prompt
        if target.ignore_eos:
            body["ignore_eos"] = True
        body |= {**ask.fields, **target.extra}
        wire = self._wire("POST", PATHS[target.endpoint], msgspec.json.encode(body))
        return PreparedRequest(wire, ask.output_tokens)

    async def send(self, prepared: PreparedRequest, due_s: float) -> RequestRecord:
        """The whole life of one request. An error of the server or of the network is in the record."""
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self.target.timeout_s):
                connection = await self._connect()
                await connection.begin(prepared.wire)
        except TimeoutError:
            answer = connection.answer if connection is not None else LoadAnswer()
            answer.error = ("timeout", f"after {self.target.timeout_s:g} s")
            self._drop(connection)
            return answer.record(due_s, sent_s, clock(), prepared.asked_tokens)
        except OSError as error:
            answer = LoadAnswer()
            ours = error.errno in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
            answer.error = ("client" if ours else "refused", str(error))
            return answer.record(due_s, sent_s, clock(), prepared.asked_tokens)
        except asyncio.CancelledError:
            self._drop(connection)
            raise
        end_s = clock()
        self._judge(connection)
        self._release(connection)
        return connection.answer.record(due_s, sent_s, end_s, prepared.asked_tokens)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a plain question, such as which models there are; raises OSError or TimeoutError."""
        async with asyncio.timeout(min(self.target.timeout_s, 30)):
            connection = await self._connect()
            await connection.begin(self._wire("GET", path, b""))
        self._release(connection)
        return connection.response.status, b"".join(connection.body)

    def _judge(self, connection: Connection) -> None:
        answer, status = connection.answer, connection.response.status
        if answer.error is not None or not status:
            return
        if status != 200:
            answer.error = (f"http {status}", error_text(b"".join(connection.body)))
        elif connection.body:
            start = b"".join(connection.body)[:120]
            answer.error = ("bad answer", f"no stream of events, but {start!r}")

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and loop.time() - connection.idle_since_s < IDLE_S:
                return connection
            self._drop(connection)
        _, connection = await loop.create_connection(
            lambda: Connection(loop), self.place.host, self.place.port, ssl=self._tls
        )
        self._all.add(connection)
        return connection

    def _release(self, connection: Connection) -> None:
        if connection.closed or not connection.response.reusable:
            self._drop(connection)
            return
        connection.idle_since_s = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def _drop(self, connection: Connection | None) -> None:
        if connection is not None:
            connection.close()
            self._all.discard(connection)

    def _wire(self, method: str, path: str, body: bytes) -> bytes:
        host, port, _, prefix = self.place
        name = f"[{host}]" if ":" in host else host
        lines = [f"{method} {prefix}{path} HTTP/1.1", f"host: {name}:{port}"]
        if self.target.api_key is not None:
            lines.append(f"authorization: Bearer {self.target.api_key}")
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "accept: */*", "", ""]).encode() + body
