"""A whole fleet from one file: its servers are started, the router listens in front of them, until it is stopped.

Fleet.start --> router, its other processes, KEDA's scaler, endpoint picker --run--> servers, scaling, reloads --> stop
"""

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import Any, Protocol

import msgspec

from cairn.core.errors import CairnError
from cairn.fleet.autoscale import LocalScaler
from cairn.fleet.config import FleetConfig, ServerGroup
from cairn.fleet.discovery import Discovery
from cairn.fleet.keda import start_keda
from cairn.fleet.listen import check_address, is_wildcard
from cairn.fleet.own_servers import OwnServers
from cairn.fleet.picker import start_picker
from cairn.fleet.refusals import unserved_aliases
from cairn.fleet.router import Router
from cairn.fleet.router_processes import (
    GC_THRESHOLDS,
    RouterProcesses,
    SharedState,
    check_processes,
)
from cairn.fleet.server_process import Gpus, share_router_secret

Say = Callable[[str], None]
WATCH_S = 2.0
AFTER_RESTART = ("host", "port", "stall_s", "max_body_bytes", "quota_file")


class ReadFile(Protocol):
    """Reads the fleet's file again; raises a ConfigError where it is wrong."""

    def __call__(self) -> FleetConfig: ...


class Listeners(msgspec.Struct, frozen=True, kw_only=True):
    """Additional listeners of a fleet, and the number of router processes."""

    keda: str | None = None  # address of KEDA's external scaler
    picker: str | None = None  # address of a gateway's endpoint picker
    processes: int = 1  # of the router

    def check(self, config: FleetConfig) -> None:
        check_processes(config, self.processes, self.keda is not None)
        for flag, address in (("--keda", self.keda), ("--endpoint-picker", self.picker)):
            if address is not None:
                check_address(flag, address)


class Fleet:
    """Everything that runs for one fleet file, in this event loop."""

    def __init__(
        self, config: FleetConfig, read: ReadFile, gpus: Gpus, listeners: Listeners, say: Say
    ) -> None:
        listeners.check(config)
        self._config, self._listeners = config, listeners
        self._read, self._gpus, self._say = read, gpus, say
        self._own = OwnServers(config, say, gpus)
        self._router = Router(config.router, self._own.urls)
        self._router.configure(config)
        self._discovery = Discovery(config, self._own.urls, self._use)
        self._scalers = [
            LocalScaler(group, self._router, self._discovery, say, gpus)
            for group in _scaled(config)
        ]
        self._others: RouterProcesses | None = None
        self._grpc_servers: list[Any] = []
        self._address = ""

    async def start(self) -> None:
        """Listen; the servers are started by `run`."""
        listeners, router = self._listeners, self._router
        self._address = await router.start(shared=listeners.processes > 1)
        if listeners.processes > 1:
            self._others = self._other_processes()
        for start, address in ((start_keda, listeners.keda), (start_picker, listeners.picker)):
            if address is not None:
                self._grpc_servers.append((await start(router, address))[0])
        await self._discovery.look()
        count, policy = len(router.workers), self._config.router.policy
        where = f" on {gethostname()}" if is_wildcard(self._config.router.host) else ""
        self._say(f"router at {self._address}{where}, {_servers(count)}, policy {policy}")

    async def run(self, stop: asyncio.Event, reload: asyncio.Event) -> None:
        """Until `stop` is set; raises when a server of its own cannot be started at all. Then all of it has ended."""
        work = [self._own.run(), stop.wait(), *(scaler.run() for scaler in self._scalers)]
        running = [asyncio.ensure_future(one) for one in work]
        beside = [self._discovery.run(), self._say_ready(), self._reload_when(reload)]
        helping = [asyncio.ensure_future(one) for one in beside]
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _cancel(helping)  # first: a reload ends the servers that it is starting
            await self._stop()
            await _cancel(running)

    async def _stop(self) -> None:
        """Clients first: requests under way end before their servers do."""
        for server in self._grpc_servers:
            await server.stop(None)
        routers = [self._router, *([self._others] if self._others is not None else [])]
        await asyncio.gather(*(one.stop() for one in routers))
        await asyncio.gather(*(one.stop() for one in (self._own, *self._scalers)))

    def _other_processes(self) -> RouterProcesses:
        """Start the other router processes on the port of the first."""
        port = int(self._address.rpartition(":")[2])
        router = msgspec.structs.replace(self._config.router, port=port)
        shared = SharedState(msgspec.structs.replace(self._config, router=router), [])
        return RouterProcesses(self._listeners.processes, shared, self._router, self._say)

    def _use(self, urls: list[str]) -> None:
        self._router.use(urls)
        if self._others is not None:
            self._others.tell(urls=urls)

    async def _reload_when(self, reload: asyncio.Event) -> None:
        """Reload servers, addresses and policy after SIGHUP. An invalid file changes nothing."""
        while True:
            await reload.wait()
            reload.clear()
            try:
                config = self._read()
                check_processes(config, self._listeners.processes, scaler=False)
                await self._own.change(config, self._discovery.use_own)
            except CairnError as error:
                self._say(f"the file was not taken: {error}")
                continue
            await self._take(config)

    async def _take(self, config: FleetConfig) -> None:
        """The servers of its own are exchanged already."""
        if _scaled(config) != _scaled(self._discovery.config):
            self._say("note: servers that are scaled change with a restart only")
        for name in AFTER_RESTART:
            now, new = getattr(self._config.router, name), getattr(config.router, name)
            if new != now:
                self._say(f"note: {name} stays {now!r}: it changes with a restart only")
        self._discovery.config = config
        self._router.configure(config)
        if self._others is not None:
            self._others.tell(config)
        await self._discovery.look()
        count, policy = len(self._router.workers), config.router.policy
        self._say(f"the file was taken: {_servers(count)}, policy {policy}")
        self._note_aliases()

    async def _say_ready(self) -> None:
        """The same words as of a single server, so that scripts that wait for one find them."""
        router = self._router
        while not router.workers or any(worker.state != "up" for worker in router.workers):
            await asyncio.sleep(0.05)
        count = len(router.workers)
        self._say(f"ready: {_servers(count)} {'is' if count == 1 else 'are'} up at {self._address}")
        self._note_aliases()

    def _note_aliases(self) -> None:
        for text in unserved_aliases(self._router):
            self._say(f"note: {text}")


def _servers(count: int) -> str:
    return f"{count} server{'' if count == 1 else 's'}"


async def _cancel(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _scaled(config: FleetConfig) -> list[ServerGroup]:
    return [group for group in config.servers if group.scaled]


async def reload_on_change(file: Path, reload: asyncio.Event) -> None:
    """Sets `reload` whenever the file has had other contents at two looks, so that it is not taken half written."""
    taken = seen = file.read_bytes()
    while True:
        await asyncio.sleep(WATCH_S)
        with suppress(OSError):  # another one may be put in its place just now
            now = file.read_bytes()
            if now == seen and now != taken:
                taken = now
                reload.set()
            seen = now


def run_fleet(
    config: FleetConfig,
    read: ReadFile,
    gpus: Sequence[str],
    listeners: Listeners,
    watched: Path | None = None,
) -> None:
    """Run a fleet until SIGTERM or Ctrl-C; SIGHUP reloads the file. `gpus` are the GPUs it may use.

    `watched`: its file, to be read again whenever it changes.
    """

    async def main() -> None:
        stop, reload = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, reload.set)
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, stop.set)
        share_router_secret()
        fleet = Fleet(config, read, Gpus(gpus), listeners, _print)
        await fleet.start()
        watching = [reload_on_change(watched, reload)] if watched is not None else []
        tasks = [asyncio.ensure_future(one) for one in watching]
        try:
            await fleet.run(stop, reload)
        finally:
            await _cancel(tasks)

    import uvloop

    uvloop.run(main())


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
