"""A stream of server-sent events: one write for everything that is due, and none while the client does not read.

    data: {...}\\n\\n  ...  data: [DONE]\\n\\n

Everything goes through ASGI's `send`, which waits while the socket's buffer is full. `write_now` runs it without a
task, up to where it would wait, and then says so; meanwhile tokens stay in the answer (`answer_reader`), so that a slow
reader costs the memory of its own answer and nothing more. One that reads nothing at all is disconnected by the kernel
(`stall_timeout`). Knows no endpoint.
"""

from collections.abc import Generator, Sequence
from typing import Any

import msgspec
from starlette.types import Send

SSE, NDJSON = b"text/event-stream; charset=utf-8", b"application/x-ndjson"
HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy in front would hold tokens back
]
DONE = b"data: [DONE]\n\n"
HOLE = "\0text\0"  # stands for the text in the event that a template is made of
_encode = msgspec.json.Encoder().encode


def event_bytes(event: object, name: str | None = None) -> bytes:
    """`name`: for protocols whose events have one."""
    data = b"data: %b\n\n" % _encode(event)
    return data if name is None else b"event: %b\n%b" % (name.encode(), data)


def last_events(*events: object) -> bytes:
    """These, and the mark that nothing follows."""
    return b"".join(map(event_bytes, events)) + DONE


class Template:
    """Events that differ in one text only, such as the chunks of an answer: encoded once, and filled for each."""

    __slots__ = ("_after", "_before")

    def __init__(self, event: object, name: str | None = None) -> None:
        """`event` has `HOLE` where the text goes."""
        self._before, _, self._after = event_bytes(event, name).rpartition(_encode(HOLE))

    def fill(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


class Suspended:
    """A call that was begun outside of a task and has to wait: awaited in a task, it goes on where it stopped."""

    __slots__ = ("_rest", "_waits_for")

    def __init__(self, rest: Generator[Any, Any, None], waits_for: object) -> None:
        self._rest, self._waits_for = rest, waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                value = yield waits_for
            except BaseException as error:  # noqa: BLE001  cancellation goes where it would have gone
                resume, value = self._rest.throw, error
            else:
                resume = self._rest.send
            try:
                waits_for = resume(value)
            except StopIteration:
                return


class EventStream:
    __slots__ = ("_headers", "_send", "_suspended", "begun")

    def __init__(
        self, send: Send, headers: Sequence[tuple[bytes, bytes]] = (), media_type: bytes = SSE
    ) -> None:
        self._send, self._headers = send, [(b"content-type", media_type), *HEADERS, *headers]
        self._suspended: Suspended | None = None
        self.begun = False

    def write_now(self, body: bytes) -> bool:
        """Write from a callback of the event loop. Returns False if the client is slow; then await `flush`."""
        if not body:
            return True
        rest: Any = self._send(_body(body, last=False)).__await__()
        try:
            waits_for = next(rest)
        except StopIteration:  # as nearly always: it has been written
            return True
        self._suspended = Suspended(rest, waits_for)
        return False

    async def write(self, body: bytes, last: bool = False) -> None:
        """Events that are encoded already, in one write; the headers before the first ones."""
        if not self.begun:
            self.begun = True
            start = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await self._send(start)
        await self._send(_body(body, last))

    async def flush(self) -> None:
        """Wait until what `write_now` has begun is written."""
        if self._suspended is not None:
            suspended, self._suspended = self._suspended, None
            await suspended


def _body(body: bytes, last: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": not last}
