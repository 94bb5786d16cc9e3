"""A server with OpenAI's API and no model, for tests of its clients: it answers as told, and keeps what it was asked.

    async with MockServer([Reply(), Reply(status=503)]) as server: ... server.url, server.bodies

Replies are given in the order in which requests arrive; the last one is repeated. Plain asyncio on loopback.
"""

import asyncio
import json
import threading
from contextlib import contextmanager
from typing import NamedTuple


class Reply(NamedTuple):
    status: int = 200
    delay_s: float = 0.0  # before the first token
    gap_s: float = 0.0  # before each further one
    tokens: int | None = None  # by default as many as were asked for
    per_event: int = 1
    usage: bool = True
    finish: bool = True
    cut_after: int | None = None  # events, then the connection breaks
    raw: bytes | None = None  # instead of everything
    error_event: str | None = None
    hang: bool = False
    plain_json: bool = False  # although a stream was asked for
    crlf: bool = False


class MockServer:
    def __init__(self, replies: list[Reply] | None = None) -> None:
        self.replies = replies or [Reply()]
        self.bodies: list[dict] = []
        self.heads: list[str] = []
        self.connections = 0
        self.running = 0
        self.most_running = 0

    async def __aenter__(self) -> "MockServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._tasks: set[asyncio.Task] = set()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        if head.startswith("GET"):
            found = head.startswith("GET /v1/models ")
            body = json.dumps({"data": [{"id": "mock"}]} if found else {}).encode()
            writer.write(_plain(200 if found else 404, body))
            return True
        fields = [line.partition(":") for line in head.split("\r\n")]
        length = next(int(value) for name, _, value in fields if name.lower() == "content-length")
        body = json.loads(await reader.readexactly(length))
        reply = self.replies[min(len(self.bodies), len(self.replies) - 1)]
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._answer(reply, body, "chat" in head.split()[1], writer)
        finally:
            self.running -= 1

    async def _answer(
        self, reply: Reply, body: dict, chat: bool, writer: asyncio.StreamWriter
    ) -> bool:
        if reply.hang:
            await asyncio.sleep(3600)
        if reply.raw is not None:
            writer.write(reply.raw)
            await writer.drain()
            return False
        if reply.status != 200 or reply.plain_json:
            text = {"error": {"message": f"status {reply.status} it is", "type": "mock"}}
            writer.write(_plain(reply.status, json.dumps(text).encode()))
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        end = "\r\n\r\n" if reply.crlf else "\n\n"
        for place, event in enumerate(_events(reply, body, chat)):
            if place == reply.cut_after:
                return False
            await asyncio.sleep(reply.delay_s if place == 0 else reply.gap_s)
            data = f"data: {event}{end}".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _events(reply: Reply, body: dict, chat: bool) -> list[str]:
    tokens = body["max_tokens"] if reply.tokens is None else reply.tokens
    events = []
    if chat:
        events.append({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    left = tokens
    while left > 0:
        text = "x " * min(left, reply.per_event)
        events.append({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
        left -= reply.per_event
    if reply.error_event is not None:
        return [json.dumps(event) for event in [*events, {"error": {"message": reply.error_event}}]]
    if reply.finish:
        last = {"delta": {}} if chat else {"text": ""}
        events.append({"choices": [{**last, "finish_reason": "length"}]})
    if reply.usage and body.get("stream_options", {}).get("include_usage"):
        size = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 7
        counted = {"prompt_tokens": size, "completion_tokens": tokens}
        events.append({"choices": [], "usage": counted})
    return [*(json.dumps(event) for event in events), "[DONE]"]


def _plain(status: int, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status} Mock\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    )
    return head.encode() + b"\r\n\r\n" + body


@contextmanager
def running(replies: list[Reply] | None = None):
    """The same in a thread of its own, for clients in other processes."""
    ready = threading.Event()
    server = MockServer(replies)
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with server:
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()
