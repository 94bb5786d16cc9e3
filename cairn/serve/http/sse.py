"""A stream of server-sent events: one write for everything that is due, and none while the client does not read.

    data: {...}\\n\\n  ...  data: [DONE]\\n\\n

`send` of the server waits while the socket's buffer is full; meanwhile tokens are merged where they are made
(`following`), so that a slow reader costs the memory of its own answer and nothing more. Knows no endpoint.
"""

from collections.abc import Sequence

import msgspec
from starlette.types import Send

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy in front would hold tokens back
]
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class EventStream:
    def __init__(self, send: Send, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._send, self._headers = send, headers
        self.begun = False

    async def write(self, *events: object, last: bool = False) -> None:
        """These events now, in one write; the headers before the first ones."""
        body = b"".join([b"data: " + _encode(event) + b"\n\n" for event in events])
        await self.write_bytes(body + DONE if last else body, last)

    async def write_named(self, name: str, event: object) -> None:
        """An event with a name, for protocols that have them."""
        await self.write_bytes(b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(event)), False)

    async def write_bytes(self, body: bytes, last: bool) -> None:
        if not self.begun:
            self.begun = True
            headers = [*HEADERS, *self._headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})
