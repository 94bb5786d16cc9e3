"""A whole fleet from one file: its servers are started, the router listens in front of them, until it is stopped."""

import asyncio
import gc
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from cairn.fleet.config import FleetConfig
from cairn.fleet.processes import processes_of
from cairn.fleet.router import Router

Say = Callable[[str], None]


async def serve_fleet(config: FleetConfig, say: Say, stop: asyncio.Event) -> None:
    """Until `stop` is set; raises when a server of its own cannot be started at all."""
    processes = processes_of(config, say)
    urls = [process.url for process in processes]
    urls += [url for group in config.servers for url in group.urls]
    router = Router(config.router, urls)
    address = await router.start()
    say(f"router at {address} in front of {len(urls)} servers, policy {config.router.policy}")
    running = [asyncio.create_task(process.run()) for process in processes]
    ready = asyncio.create_task(_say_ready(router, address, say))
    ended = asyncio.create_task(stop.wait())
    gc.freeze()
    try:
        done, _ = await asyncio.wait([*running, ended], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        ready.cancel()
        await router.stop()
        await asyncio.gather(*(process.stop() for process in processes))
        for task in [*running, ended]:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _say_ready(router: Router, address: str, say: Say) -> None:
    """The same words as of a single server, so that whoever waits for one finds them."""
    while not all(worker.state == "up" for worker in router.workers):
        await asyncio.sleep(0.05)
    say(f"ready: {len(router.workers)} servers are up at {address}")


def run_fleet(config: FleetConfig) -> None:
    """In an event loop of its own, until SIGTERM or Ctrl-C."""

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, stop.set)
        await serve_fleet(config, lambda text: print(text, file=sys.stderr, flush=True), stop)

    import uvloop

    uvloop.run(main())
