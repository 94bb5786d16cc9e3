"""Servers without a model that stream tokens as ours do: marked, continuable, and to be killed at any token.

The n-th token of an answer is a function of the prompt and of n alone, so a continued answer can be checked.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from cairn.serve.pulse import Events, Hello, Load, framed
from cairn.serve.token_marks import PROGRESS


def token(prompt: str, at: int) -> int:
    return (sum(prompt.encode()) * 31 + at * at * 7) % 1000


def text_of(prompt: str, count: int) -> str:
    return "".join(f" {token(prompt, at)}" for at in range(count))


class FakeServer:
    def __init__(
        self, gap_s: float = 0.002, marked: bool = True, models: Sequence[str] = ("fake",)
    ) -> None:
        self.gap_s, self.marked, self.models = gap_s, marked, list(models)
        self.served: list[int] = []  # tokens that each request was continued from
        self.die_after: int | None = None  # tokens of the next answer
        self.fails_after: int | None = (
            None  # tokens of the next answer: it lives on, its engine does not
        )
        self.continues = True  # whole answers, too
        self.refuse: int | None = None  # a status instead of answers
        self.code, self.refused = "queue_full", 0
        self.frozen = False
        self.frozen_answers = False  # it tells its pulse, and answers nobody
        self.stuck_after: int | None = None  # tokens of an answer; its pulse goes on
        self.status = "ok"  # as its pulse says
        self.step_tokens = 0  # likewise
        self.filler = ""  # that each event carries
        self.page: bytes | None = None  # the answer to whoever asks for its pulse, instead of one
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._listening.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def up(self) -> bool:
        return self._listening is not None and self._listening.is_serving()

    def deaf(self) -> None:
        """It takes no more connections, and those that it has go on."""
        if self._listening is not None:
            self._listening.close()

    def kill(self) -> None:
        """As kill -9: every connection breaks, and nobody listens any more."""
        if self._listening is not None:
            self._listening.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                await self._one(reader, writer)
        self._writers.discard(writer)
        self._tasks.discard(task)
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.page is not None:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(self.page) + self.page
            )
        elif " /cairn/pulse " in head[0]:
            await self._pulse(writer)
        elif self.refuse is not None:
            self.refused += 1
            document = {"error": {"message": "no room", "code": self.code}}
            await self._whole(writer, self.refuse, document)
        elif not body:
            asked = {"prompt": "", "max_tokens": 2, "stream": True}
            await (
                self._answer(writer, asked, [])
                if " /stream " in head[0]
                else self._whole(writer, 200, {"data": []})
            )
        else:
            count = int(headers.get("x-cairn-continue", 0))
            if count and not self.continues:
                await self._whole(writer, 400, {"error": {"code": "bad_continuation"}})
                return
            before = msgspec.msgpack.decode(body[-count:]) if count else []
            asked = json.loads(body[:-count] if count else body)
            self.served.append(len(before))
            await self._answer(writer, asked, before)

    async def _pulse(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        frames = framed(Hello(1, self.models, 16, True, 8, "both", self.step_tokens)) + framed(
            Events(0)
        )
        while True:
            frames += framed(Load(self.status))
            if not self.frozen:
                writer.write(b"%x\r\n%b\r\n" % (len(frames), frames))
            frames = b""
            await writer.drain()
            await asyncio.sleep(0.05)

    async def _whole(self, writer: asyncio.StreamWriter, status: int, document: object) -> None:
        body = json.dumps(document, separators=(",", ":")).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()

    async def _whole_answer(
        self,
        writer: asyncio.StreamWriter,
        prompt: str,
        count: int,
        before: int,
        die_after: int | None,
        fails_after: int | None,
    ) -> None:
        """As `ProgressSend` writes it where it tells every token, if its server tells any."""
        if self.marked:
            head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: %b\r\n\r\n"
            writer.write(head % PROGRESS)
        for at in range(before, count if fails_after is None else before + fails_after):
            if die_after is not None and at - before >= die_after:
                self.kill()
            if self.marked:
                told = b":t %d\n\n" % token(prompt, at)
                writer.write(b"%x\r\n%b\r\n" % (len(told), told))
            await writer.drain()
            await asyncio.sleep(self.gap_s)
        status = 200 if fails_after is None else 500
        document = {"text": text_of(prompt, count)}
        if not self.marked:
            await self._whole(writer, 200, document)
            return
        lines = b"content-type: application/json\r\n"
        last = b":a %d %d\n%b%b" % (status, len(lines), lines, json.dumps(document).encode())
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))
        await writer.drain()

    async def _answer(self, writer: asyncio.StreamWriter, asked: dict, before: list[int]) -> None:
        prompt, count = asked["prompt"], asked["max_tokens"]
        while self.frozen_answers:
            await asyncio.sleep(0.01)
        assert before == [token(prompt, at) for at in range(len(before))], "wrong tokens so far"
        die_after, self.die_after = self.die_after, None
        fails_after, self.fails_after = self.fails_after, None
        if not asked.get("stream"):
            await self._whole_answer(writer, prompt, count, len(before), die_after, fails_after)
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
        )
        for at in range(len(before), count if fails_after is None else len(before) + fails_after):
            while self.frozen or (self.stuck_after is not None and at >= self.stuck_after):
                await asyncio.sleep(0.01)
            made = token(prompt, at)
            event = (
                b"data: %b\n\n" % json.dumps({"text": f" {made}", "filler": self.filler}).encode()
            )
            event += b":t %d\n\n" % made if self.marked else b""
            chunk = b"%x\r\n%b\r\n" % (len(event), event)
            if die_after is not None and at - len(before) >= die_after:
                writer.write(chunk[:-9])  # half of it
                await writer.drain()
                self.kill()
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(self.gap_s)
        last = b"data: [DONE]\n\n" + (b":e\n\n" if self.marked else b"")
        if fails_after is None:
            writer.write(b"%x\r\n%b\r\n" % (len(last), last))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
