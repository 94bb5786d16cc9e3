"""Follows one server: is it there, what has it cached, how busy is it. One task for each server.

connect -> GET /cairn/pulse -> Hello, Events, Load ... | silence or a lost connection: down, and again
             404: a server of another kind, which is only asked whether it is healthy
"""

import asyncio
import os
from contextlib import suppress

import msgspec

from cairn.fleet.index import KeyIndex
from cairn.fleet.worker import Worker
from cairn.serve.pulse import LARGEST_FRAME, LENGTH, Events, Hello, Load, decode_frame

AGAIN_S = 0.1  # after a server was lost or refused
POLL_S = 0.5  # a server of another kind
LARGEST_CHUNK = 2 * LARGEST_FRAME
KEY = "CAIRN_FLEET_KEY"  # the API key of the servers, where they want one


class Unfollowed(Exception):
    """The server cannot be followed, for a reason."""


class Stopping(Exception):
    """The server has ended its pulse: it shuts down."""


class PulseClient:
    def __init__(self, worker: Worker, index: KeyIndex, stall_s: float) -> None:
        self.worker, self.index, self._stall_s = worker, index, stall_s
        self.changed = asyncio.Event()  # a server came up or went down
        # It went silent: its connections do not break by themselves.
        self.silent = False

    async def run(self) -> None:
        while True:
            try:
                await self._follow()
            except Stopping:
                self.index.forget(self.worker.number)  # it finishes what it has
            except TimeoutError:
                self.silent = True
                self._down(f"it has been silent for {self._stall_s:g} s")
            except (OSError, EOFError, msgspec.MsgspecError) as problem:
                self._down(str(problem) or type(problem).__name__)
            except Unfollowed as problem:
                self._down(str(problem), answers=True)
            except (ValueError, IndexError, asyncio.LimitOverrunError):
                self._down("it answers GET /cairn/pulse with something else", answers=True)
            await asyncio.sleep(AGAIN_S)

    def _down(self, reason: str, answers: bool = False) -> None:
        """`answers`: a server is there, but not one of ours."""
        self.index.forget(self.worker.number)
        if self.worker.state != "starting":
            self.worker.down(reason)
        elif answers:
            self.worker.reason = reason
        self.changed.set()

    async def _follow(self) -> None:
        async with asyncio.timeout(self._stall_s):
            reader, writer = await asyncio.open_connection(self.worker.host, self.worker.port)
        try:
            status = await self._ask(reader, writer, "/cairn/pulse")
            if status == 200:
                await self._read_frames(reader)
            elif status in (404, 405):
                await self._poll()
            else:
                raise Unfollowed(f"GET /cairn/pulse was answered with {status}")
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str
    ) -> int:
        key = os.environ.get(KEY)
        secret = f"Authorization: Bearer {key}\r\n" if key else ""
        host = f"{self.worker.host}:{self.worker.port}"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{secret}\r\n".encode())
        async with asyncio.timeout(self._stall_s):
            head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1])

    async def _read_frames(self, reader: asyncio.StreamReader) -> None:
        buffer = bytearray()
        while True:
            async with asyncio.timeout(self._stall_s):
                size = int(await reader.readuntil(b"\r\n"), 16)
                if size > LARGEST_CHUNK:
                    raise Unfollowed(f"a chunk of {size} bytes")
                buffer += await reader.readexactly(size)
                await reader.readexactly(2)
            if not size:
                raise Stopping
            while len(buffer) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(buffer)
                if length > LARGEST_FRAME:
                    raise Unfollowed(f"a frame of {length} bytes")
                if len(buffer) < LENGTH.size + length:
                    break
                frame = bytes(buffer[LENGTH.size : LENGTH.size + length])
                del buffer[: LENGTH.size + length]
                self._take(decode_frame(frame))

    def _take(self, frame: Hello | Events | Load) -> None:
        worker = self.worker
        if isinstance(frame, Hello):
            self.index.forget(worker.number)
            worker.up(frame)
            self.silent = False
            self.changed.set()
        elif isinstance(frame, Load):
            before = worker.state
            worker.told(frame)
            if worker.state != before:
                self.changed.set()
        elif worker.hello is None or not worker.hello.exact:
            return
        elif not self.index.note(worker.number, frame):
            raise Unfollowed("an event of its cache was lost")

    async def _poll(self) -> None:
        """A server of another kind: healthy or not is all that it tells."""
        while True:
            async with asyncio.timeout(self._stall_s):
                reader, writer = await asyncio.open_connection(self.worker.host, self.worker.port)
                try:
                    status = await self._ask(reader, writer, "/health")
                finally:
                    writer.close()
            if status != 200:
                raise Unfollowed(f"GET /health was answered with {status}")
            if self.worker.state != "up":
                self.worker.up(None)
                self.changed.set()
            await asyncio.sleep(POLL_S)
