"""Sends requests to any OpenAI-compatible server and writes down when each token came.

    Ask --prepare--> bytes --send--> one connection per request in flight, kept for the next --> Record

Talks HTTP/1.1 over asyncio with a reader of its own (`http_reader`): some microseconds per token, so that the client is
not what gets measured. Never retries a request that a server may have begun, never raises for what a server does: an
error becomes a Record of its kind. Knows nothing about rates and statistics.
"""

import asyncio
import ssl
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from cairn.bench.http_reader import Events, ProtocolError, Response
from cairn.bench.load_answer import Answer, Record, error_text
from cairn.bench.load_prompts import Ask
from cairn.core.errors import UsageError

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Which server, and how to ask it."""

    url: str
    model: str = ""
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: dict[str, Any] = {}  # more fields for the body
    timeout_s: float = 600.0


class Prepared(NamedTuple):
    """A request as it goes over the wire."""

    wire: bytes
    asked_tokens: int


class Place(NamedTuple):
    host: str
    port: int
    tls: bool
    prefix: str  # of every path


def place(url: str) -> Place:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise UsageError(f"'{url}' is no address of a server", hint="such as http://127.0.0.1:8000")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")  # people paste a base_url, too
    return Place(parts.hostname, port or (443 if tls else 80), tls, prefix)


class Connection(asyncio.Protocol):
    """One request at a time; the time of each piece is taken when it arrives."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._clock = loop.time
        self._loop = loop
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.heard = False  # anything of this answer
        self.served = 0  # answers before this one

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  of create_connection

    def begin(self, wire: bytes) -> "asyncio.Future[None]":
        assert self.transport is not None
        self.response = Response()
        self.answer = Answer()
        self.body: list[bytes] = []
        self.heard = False
        self._events: Events | None = None
        self._finished = self._loop.create_future()
        self.transport.write(wire)
        return self._finished

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        if self.closed or not self._busy():
            self.close()  # bytes that nobody asked for
            return
        self.heard = True
        response = self.response
        try:
            for piece in response.feed(data):
                if self._events is None:
                    self._events = self._open(response)
                if not self._is_stream:
                    self.body.append(piece)
                    continue
                for event in self._events.feed(piece):
                    self.answer.take(event, now)
        except ProtocolError as error:
            self.answer.error = ("bad answer", error.message)
            self._finish()
            self.close()
            return
        if response.done:
            self._finish()

    def _open(self, response: Response) -> Events:
        kind = response.headers.get("content-type", "")
        self._is_stream = response.status == 200 and kind.startswith("text/event-stream")
        return Events()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._busy():
            if not self.response.end():
                self.answer.error = self.answer.error or ("closed", str(exc or "end of the stream"))
            self._finish()

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    def _busy(self) -> bool:
        return self.served_future is not None and not self.served_future.done()

    @property
    def served_future(self) -> "asyncio.Future[None] | None":
        return getattr(self, "_finished", None)

    def _finish(self) -> None:
        if self._busy():
            self._finished.set_result(None)


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

    def prepare(self, ask: Ask) -> Prepared:
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
        wire = self._wire("POST", PATHS[target.endpoint], msgspec.json.encode(body | target.extra))
        return Prepared(wire, ask.output_tokens)

    async def send(self, prepared: Prepared, due_s: float) -> Record:
        """The whole life of one request. An error of the server or of the network is in the record."""
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self.target.timeout_s):
                while True:
                    connection = await self._connect()
                    reused = connection.served > 0
                    await connection.begin(prepared.wire)
                    if connection.heard or not reused:
                        break
                    # The server closed a connection that had been idle, before it saw this request.
        except TimeoutError:
            answer = connection.answer if connection is not None else Answer()
            answer.error = ("timeout", f"after {self.target.timeout_s:g} s")
            self._drop(connection)
            return answer.record(due_s, sent_s, clock(), prepared.asked_tokens)
        except OSError as error:
            answer = Answer()
            answer.error = ("refused", str(error))
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
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
            self._all.discard(connection)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(loop), self.place.host, self.place.port, ssl=self._tls
        )
        self._all.add(connection)
        return connection

    def _release(self, connection: Connection) -> None:
        if connection.closed or not connection.response.reusable:
            self._drop(connection)
            return
        connection.served += 1
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
