"""Servers that the fleet starts itself: each a process of its own on a port of its own, started again when it ends.

    starting --> running --ends--> wait (longer each time, up to 10 s) --> starting ...

A server that never came up is a mistake in its arguments: the fleet stops with its last lines. One that was up before
is started again on the same port, so that the router finds it where it was.
"""

import asyncio
import os
import signal
import socket
import sys
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress

from cairn.core.die_with_parent import die_with_parent
from cairn.core.errors import CairnError
from cairn.core.shared_secret import Secret
from cairn.fleet.config import ServerGroup
from cairn.serve.token_marks import ROUTER_SECRET

LAST_LINES = 12
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 10.0
STOP_S = 30.0
READ_BYTES, LONGEST_LINE = 1 << 16, 1 << 14


def share_router_secret() -> None:
    """Set the router secret in the environment for this process's routers and servers, unless it is set."""
    os.environ.setdefault(ROUTER_SECRET, Secret.fresh().reveal().decode())


class ServerProcess:
    def __init__(
        self,
        group: ServerGroup,
        name: str,
        say: Callable[[str], None],
        gpus: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`gpus`: those that it sees, as CUDA_VISIBLE_DEVICES names them; empty: it is left to the server.

        `environment`: more variables of its own.
        """
        self._variables = dict(environment or {})
        self.name, self._say, self._group = name, say, group
        self.gpus = list(gpus)
        self._reserved = socket.socket()  # so that no other program gets the port before it starts
        self._reserved.bind(("127.0.0.1", 0))
        weakref.finalize(self, self._reserved.close)
        self.port = self._reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.pid: int | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._was_ready = False
        self._last: deque[str] = deque(maxlen=LAST_LINES)

    @property
    def is_ready(self) -> bool:
        """Return whether the server has ever been ready since its first start."""
        return self._was_ready

    @property
    def command(self) -> list[str]:
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        own = [self._group.model, *self._group.args, *place]
        return [sys.executable, "-m", "cairn", "serve", *own]

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            **self._variables,
            **({"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}),
        }

    async def run(self) -> None:
        """Until `stop`; raises when it ends without ever having been ready."""
        wait_s = FIRST_WAIT_S
        while not self._stopping:
            began = asyncio.get_running_loop().time()
            status = await self._once()
            if self._stopping:
                return
            if not self._was_ready:
                said = "\n".join(self._last) or "(it said nothing)"
                raise CairnError(
                    f"{self.name} ended with status {status} before it was ready:\n{said}",
                    hint=f"try it alone: cairn serve {self._group.model} {' '.join(self._group.args)}",
                )
            lived_s = asyncio.get_running_loop().time() - began
            wait_s = FIRST_WAIT_S if lived_s > LONGEST_WAIT_S else min(2 * wait_s, LONGEST_WAIT_S)
            self._say(f"{self.name} ended with status {status}; it is started again")
            await asyncio.sleep(wait_s)

    async def _once(self) -> int:
        self._reserved.close()
        self._process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=self._environment(),
            preexec_fn=die_with_parent,  # a router that is killed leaves no servers behind
        )
        self.pid = self._process.pid
        if self._stopping:  # `stop` came while it was being started
            self._process.terminate()
        assert self._process.stderr is not None
        async for text in lines_of(self._process.stderr):
            self._last.append(text)
            if text.startswith("ready after"):
                self._was_ready = True
                self._say(f"{self.name} (process {self.pid}): {text}")
        return await self._process.wait()

    async def stop(self) -> None:
        """Terminate the server gracefully, and kill it if it does not exit."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """However long they are: a bar of progress is written over itself, and has no end of line for minutes."""
    rest = b""
    while data := await stream.read(READ_BYTES):
        *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
        rest = rest[-LONGEST_LINE:]
        for line in filter(None, lines):
            yield line.decode(errors="replace").rstrip()
    if rest:
        yield rest.decode(errors="replace").rstrip()


class Gpus:
    """Free GPUs of the machine."""

    def __init__(self, names: Sequence[str]) -> None:
        self._free = list(names)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[str] | None:
        """Allocate GPUs; None if there are not enough."""
        if count > len(self._free):
            return None
        names, self._free = self._free[:count], self._free[count:]
        return names

    def give_back(self, names: Sequence[str]) -> None:
        self._free += names
