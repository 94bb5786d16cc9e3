"""A stream of server-sent events: one write for everything that is due, and none while the client does not read.

    data: {...}\\n\\n  ...  data: [DONE]\\n\\n

`send` of the server waits while the socket's buffer is full, and `write_now` says that it is; meanwhile tokens stay
where they are made, in the answer (`following`), so that a slow reader costs the memory of its own answer and nothing
more. One that reads nothing at all is disconnected by the kernel (`stall_timeout`). Knows no endpoint.
"""

from collections.abc import Sequence

import msgspec
from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
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


def _uvicorn_behind(send: Send) -> RequestResponseCycle | None:
    """The connection of uvicorn that `send` belongs to; None where something is in between, such as CORS.

    A call of `send` for every token is a third of what the token costs. So the chunks of a stream that has begun are
    written past it, in the same framing, and `send` sees only the beginning and the end.
    """
    cycle = getattr(send, "__self__", None)
    return cycle if isinstance(cycle, RequestResponseCycle) else None


class EventStream:
    __slots__ = ("_cycle", "_headers", "_send", "begun")

    def __init__(self, send: Send, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._send, self._headers = send, headers
        self._cycle = _uvicorn_behind(send)
        self.begun = False

    @property
    def direct(self) -> bool:
        """Can `write_now` be used?"""
        return self._cycle is not None and self.begun and self._cycle.chunked_encoding is True

    def write_now(self, body: bytes) -> bool:
        """As `write`, but at once. False: the client is behind or has left; use that one next."""
        cycle = self._cycle
        if cycle is None or cycle.disconnected:
            return False
        if body:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return not cycle.flow.write_paused

    async def write(self, body: bytes, last: bool = False) -> None:
        """Events that are encoded already, in one write; the headers before the first ones."""
        if not self.begun:
            self.begun = True
            headers = [*HEADERS, *self._headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})
