"""Several processes of the router behind one port (SO_REUSEPORT): the kernel distributes connections among them.

    fleet serve --processes 3     first: starts the servers, listens too     second, third: routers, fed by lines
                                    '--{"urls": [...], "config": {...}, "processes": [...]}--> stdin of each

Every process follows all servers itself, so each knows all caches; what the others have sent shows in the servers'
loads. Each one also listens on a port of its own, where it can be asked about itself. One that dies is started again.
"""

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from cairn.core.die_with_parent import die_with_parent
from cairn.core.errors import ConfigError
from cairn.fleet.config import FleetConfig
from cairn.fleet.router import Router

AGAIN_S, LONGEST_AGAIN_S = 0.2, 10.0  # doubles as long as it does not start
STOP_S = 35.0
LONGEST_LINE = 16 << 20
GC_THRESHOLDS = (10_000, 50, 100)  # a request leaves few cycles; looking for them often costs more
COMMAND = (sys.executable, "-m", "cairn.fleet.router_processes")


class SharedState(msgspec.Struct, frozen=True):
    """State of all processes, sent completely whenever it changes."""

    config: FleetConfig
    urls: list[str]
    processes: list[str] = []  # where each of them can be asked


def check_processes(config: FleetConfig, processes: int, scaler: bool) -> None:
    """Reject options that only a single process supports, before anything starts."""
    if processes == 1:
        return
    if scaler or any(group.scaled for group in config.servers):
        raise ConfigError(
            f"--processes is {processes}, and servers are scaled by what one process sees",
            hint="use `count` instead of `least` and `most`, without --keda; or one process",
        )
    limits = [
        config.router.limits,
        *((one.requests_per_day, one.tokens_per_day, one.at_once) for one in config.keys),
    ]
    if any(limit is not None for one in limits for limit in one) and not config.router.quota_file:
        raise ConfigError(
            f"--processes is {processes}, and keys have limits, which are counted in one",
            hint="name a file where all of them count: quota_file in [router]",
        )


class RouterProcesses:
    """The other processes, seen from the first one."""

    def __init__(
        self, count: int, state: SharedState, router: Router, say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._state, self._router, self._addresses = state, router, {0: router.own_address}
        self._inputs: dict[int, asyncio.StreamWriter] = {}
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(1, count)]

    def tell(self, config: FleetConfig | None = None, urls: list[str] | None = None) -> None:
        """Send changes to the processes; the shared address cannot change."""
        old = self._state
        if config is not None:
            at = old.config.router
            shared = msgspec.structs.replace(config.router, host=at.host, port=at.port)
            config = msgspec.structs.replace(config, router=shared)
        known = [self._addresses[number] for number in sorted(self._addresses)]
        self._state = SharedState(config or old.config, old.urls if urls is None else urls, known)
        self._router.processes = known
        for writer in self._inputs.values():
            writer.write(msgspec.json.encode(self._state) + b"\n")

    async def _run(self, number: int) -> None:
        again_s = AGAIN_S
        while not self._stopping.is_set():
            try:
                started, ended = await self._once(number)
            except OSError as error:
                started, ended = False, str(error)
            if self._stopping.is_set():
                return
            again_s = AGAIN_S if started else min(2 * again_s, LONGEST_AGAIN_S)
            did = "has ended" if started else "did not start"
            self._say(f"process {number + 1} {did} ({ended}); again in {again_s:g} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(again_s):
                    await self._stopping.wait()

    async def _once(self, number: int) -> tuple[bool, str]:
        """Run a process; returns whether it listened, and how it ended."""
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._processes[number] = process
        process.stdin.write(msgspec.json.encode(self._state) + b"\n")
        if address := (await process.stdout.readline()).decode().strip():
            self._addresses[number] = address
            self._inputs[number] = process.stdin
            self.tell()
        status = await process.wait()
        self._inputs.pop(number, None)
        self._addresses.pop(number, None)
        return bool(address), f"exit status {status}"

    async def stop(self) -> None:
        """Stop the processes after their current requests."""
        self._stopping.set()
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.terminate()
        _, late = await asyncio.wait(self._tasks, timeout=STOP_S)
        for process in self._processes.values() if late else ():
            with suppress(ProcessLookupError):
                process.kill()
        for task in late:
            task.cancel()


async def _run_process() -> None:
    """Entry point of a router process; runs until its input ends or SIGTERM."""
    import signal

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the first process says when
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    first = msgspec.json.decode(await reader.readline(), type=SharedState)
    router = Router(first.config.router, first.urls)
    router.configure(first.config)
    await router.start(shared=True)
    os.write(1, f"{router.own_address}\n".encode())
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)

    async def follow() -> None:
        while line := await reader.readline():
            state = msgspec.json.decode(line, type=SharedState)
            router.configure(state.config)
            router.use(state.urls)
            router.processes = state.processes

    following = asyncio.create_task(follow())
    following.add_done_callback(lambda _: stop.set())  # an error ends it, too: it is started again
    await stop.wait()
    await router.stop()
    if following.done():
        following.result()
    following.cancel()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_run_process())
