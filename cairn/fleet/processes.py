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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate

from cairn.core.errors import CairnError
from cairn.fleet.config import FleetConfig, ServerGroup

LAST_LINES = 12
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 10.0
STOP_S = 30.0


class ServerProcess:
    def __init__(
        self, group: ServerGroup, name: str, say: Callable[[str], None], first_gpu: int = 0
    ) -> None:
        """`first_gpu`: of those that the fleet may use; the server sees its own only."""
        self.name, self._say, self._group = name, say, group
        self._gpus = range(first_gpu, first_gpu + group.gpus)
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.pid: int | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._was_ready = False
        self._last: deque[str] = deque(maxlen=LAST_LINES)

    @property
    def command(self) -> list[str]:
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        own = [self._group.model, *self._group.args, *place]
        return [sys.executable, "-m", "cairn", "serve", *own]

    def _environment(self) -> dict[str, str]:
        if not self._gpus:
            return dict(os.environ)
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        known = allowed.split(",") if allowed else [str(at) for at in range(self._gpus.stop)]
        if len(known) < self._gpus.stop:
            raise CairnError(
                f"{self.name} needs GPU {self._gpus.stop - 1}, and CUDA_VISIBLE_DEVICES is {allowed}",
                hint="fewer servers, or more GPUs",
            )
        own = ",".join(known[at] for at in self._gpus)
        return {**os.environ, "CUDA_VISIBLE_DEVICES": own}

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
        self._process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=self._environment(),
        )
        self.pid = self._process.pid
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._last.append(text)
            if text.startswith("ready after"):
                self._was_ready = True
                self._say(f"{self.name} (process {self.pid}): {text}")
        return await self._process.wait()

    async def stop(self) -> None:
        """As an operator does it: it finishes what it has; by force only where that does not help."""
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


def processes_of(config: FleetConfig, say: Callable[[str], None]) -> list[ServerProcess]:
    """Of groups with a fixed number; those that are scaled are `autoscale`'s."""
    fixed = [group for group in config.servers if group.model and not group.scaled]
    groups = [group for group in fixed for _ in range(group.count)]
    firsts = accumulate((group.gpus for group in groups), initial=0)
    return [
        ServerProcess(group, f"server-{at}", say, first)
        for at, (group, first) in enumerate(zip(groups, firsts, strict=False))
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
