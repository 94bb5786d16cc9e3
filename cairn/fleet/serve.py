"""A whole fleet from one file: its servers are started, the router listens in front of them, until it is stopped."""

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from cairn.core.errors import CairnError
from cairn.fleet.autoscale import LocalScaler
from cairn.fleet.config import FleetConfig, ServerGroup
from cairn.fleet.copies import GC_THRESHOLDS, Copies, State, check_copies
from cairn.fleet.discovery import Discovery
from cairn.fleet.keda import start_keda
from cairn.fleet.listen import check_address
from cairn.fleet.own_servers import OwnServers
from cairn.fleet.picker import start_picker
from cairn.fleet.processes import Gpus
from cairn.fleet.router import Router

Say = Callable[[str], None]


class Reload(Protocol):
    """Reads the fleet's file again; raises a ConfigError where it is wrong."""

    def __call__(self) -> FleetConfig: ...


async def serve_fleet(
    config: FleetConfig,
    say: Say,
    stop: asyncio.Event,
    reload: asyncio.Event,
    read: Reload,
    gpus: Gpus,
    keda: str | None = None,
    picker: str | None = None,
    processes: int = 1,
) -> None:
    """Until `stop` is set; raises when a server of its own cannot be started at all.

    `keda`, `picker`: addresses where KEDA's external scaler and a gateway's endpoint picker are answered.
    """
    check_copies(config, processes, keda is not None)
    for flag, address in (("--keda", keda), ("--endpoint-picker", picker)):
        if address is not None:
            check_address(flag, address)
    own = OwnServers(config, say, gpus)
    router = Router(config.router, own.urls)
    router.configure(config)
    address = await router.start(shared=processes > 1)
    copies = _copies(config, router, address, processes, say)

    def use(urls: list[str]) -> None:
        router.use(urls)
        if copies is not None:
            copies.tell(urls=urls)

    discovery = Discovery(config, own.urls, use)
    answering = [await start_keda(router, keda)] if keda is not None else []
    answering += [await start_picker(router, picker)] if picker is not None else []
    await discovery.look()
    say(f"router at {address}, {len(router.workers)} servers, policy {config.router.policy}")
    running = [asyncio.create_task(own.run()), asyncio.create_task(_wait(stop))]
    scalers = [
        LocalScaler(group, router, discovery, say, gpus) for group in config.servers if group.scaled
    ]
    running += [asyncio.create_task(scaler.run()) for scaler in scalers]
    beside = [
        asyncio.create_task(discovery.run()),
        asyncio.create_task(_say_ready(router, address, say)),
        asyncio.create_task(_reload(router, discovery, own, reload, read, say, copies)),
    ]
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in beside:  # first: a reload ends the servers that it is starting
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        for server, _ in answering:
            await server.stop(None)
        await asyncio.gather(router.stop(), *([copies.stop()] if copies is not None else []))
        await asyncio.gather(*(one.stop() for one in (own, *scalers)))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _copies(
    config: FleetConfig, router: Router, address: str, processes: int, say: Say
) -> Copies | None:
    """The other processes of the router, on the port that the first one has got."""
    if processes == 1:
        return None
    port = int(address.rpartition(":")[2])
    shared = msgspec.structs.replace(
        config, router=msgspec.structs.replace(config.router, port=port)
    )
    return Copies(processes, State(shared, []), router, say)


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()


async def _reload(
    router: Router,
    discovery: Discovery,
    own: OwnServers,
    reload: asyncio.Event,
    read: Reload,
    say: Say,
    copies: Copies | None,
) -> None:
    """After SIGHUP: servers, addresses and the policy of the file as it is now. A wrong file changes nothing."""
    while True:
        await reload.wait()
        reload.clear()
        try:
            config = read()
            check_copies(config, 1 if copies is None else 2, scaler=False)
            await own.change(config, discovery.use_own)
        except CairnError as error:
            say(f"the file was not taken: {error}")
            continue
        if _scaled(config) != _scaled(discovery.config):
            say("servers that are scaled change with a restart only")
        discovery.config = config
        router.configure(config)
        if copies is not None:
            copies.tell(config)
        await discovery.look()
        say(f"the file was taken: {len(router.workers)} servers, policy {config.router.policy}")


def _scaled(config: FleetConfig) -> list[ServerGroup]:
    return [group for group in config.servers if group.scaled]


async def _say_ready(router: Router, address: str, say: Say) -> None:
    """The same words as of a single server, so that scripts that wait for one find them."""
    while not router.workers or any(worker.state != "up" for worker in router.workers):
        await asyncio.sleep(0.05)
    say(f"ready: {len(router.workers)} servers are up at {address}")


def run_fleet(
    config: FleetConfig,
    read: Reload,
    gpus: Sequence[str],
    keda: str | None = None,
    picker: str | None = None,
    processes: int = 1,
) -> None:
    """In an event loop of its own, until SIGTERM or Ctrl-C; SIGHUP reads the file again. `gpus`: that it may use."""

    async def main() -> None:
        stop, reload = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, reload.set)
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, stop.set)
        await serve_fleet(config, _print, stop, reload, read, Gpus(gpus), keda, picker, processes)

    import uvloop

    uvloop.run(main())


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
