"""A server without a model, for measuring what stands in front of it.

    python -m cairn.fleet.measure.mock_server PORT [EVENTS]

    POST with "stream": true    64 events of about 170 bytes, one every 10 ms      POST without    one JSON document
    GET /cairn/pulse            as a server of ours, so that our router does all of its work; with EVENTS, of a stream,
                                also the keys of every prompt that it got: all of it is cached from then on

One event loop, raw protocols: it has to cost less than what is measured.
"""

import asyncio
import sys
from typing import cast

import httptools

from cairn.serve.pulse import Events, Hello, Load, framed
from cairn.serve.text_keys import prompt_keys, read_fields

FRAMES, PERIOD_S, PULSE_S = 64, 0.01, 0.05
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","model":"mock","choices":'
    b'[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
WHOLE = (
    b'{"id":"chatcmpl-0","object":"chat.completion","model":"mock","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"a few words"},"finish_reason":"stop"}],"usage":{"prompt_tokens":200,'
    b'"completion_tokens":3,"total_tokens":203}}'
)
MODELS = b'{"object":"list","data":[{"id":"mock","object":"model"}]}'


class ServerState:
    """State shared by all connections of a server: stream events, and keys to report."""

    def __init__(self, events: int) -> None:
        self.events = events or FRAMES
        self.keys: list[tuple[int, int]] | None = [] if events else None
        self.number = 0

    def note_prompt(self, body: bytes) -> None:
        if self.keys is not None:
            prompt = prompt_keys(read_fields(body))
            self.keys += zip(prompt.keys, prompt.tokens, strict=True)

    def take(self) -> bytes:
        """Periodic report of load and new keys."""
        load = framed(Load(step_s=PERIOD_S, token_s=25e-6))
        if not self.keys:
            return load
        self.number, stored, self.keys = self.number + 1, self.keys, []
        return framed(Events(self.number, stored)) + load


class MockServer(asyncio.Protocol):
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._parser = httptools.HttpRequestParser(self)
        self._target, self._body, self._routed = b"", b"", False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._target, self._body, self._routed = b"", b"", False

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._routed = self._routed or name.lower() == b"x-cairn-router"

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._target == b"/cairn/pulse":
            self._begin(b"application/x-cairn-pulse")
            self._chunk(
                framed(Hello(1, ["mock"], 16, True, 1024, step_tokens=2048)) + framed(Events(0))
            )
            self._pulse()
        elif self._body and b'"stream":true' in self._body.replace(b" ", b""):
            self._state.note_prompt(self._body)
            self._begin(b"text/event-stream")
            self._stream(0)
        else:
            self._whole(WHOLE if self._body else MODELS)

    def _whole(self, body: bytes) -> None:
        if self._transport is not None:
            head = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            )
            self._transport.write(head % len(body) + body)

    def _begin(self, kind: bytes) -> None:
        if self._transport is not None:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"
            self._transport.write(head % kind)

    def _chunk(self, body: bytes, last: bytes = b"") -> None:
        if self._transport is not None:
            self._transport.write(b"%x\r\n%b\r\n%b" % (len(body), body, last))

    def _pulse(self) -> None:
        if self._transport is not None:
            self._chunk(self._state.take())
            period_s = 0.4 if self._state.keys is None else PULSE_S
            asyncio.get_running_loop().call_later(period_s, self._pulse)

    def _stream(self, at: int) -> None:
        if self._transport is None:
            return
        if at == self._state.events:
            self._chunk(b"data: [DONE]\n\n" + (b":e\n\n" if self._routed else b""), b"0\r\n\r\n")
            return
        self._chunk(EVENT + (b":t %d\n\n" % at if self._routed else b""))
        asyncio.get_running_loop().call_later(PERIOD_S, self._stream, at + 1)


async def main(port: int, events: int = 0) -> None:
    state = ServerState(events)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: MockServer(state), "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(*map(int, sys.argv[1:])))
