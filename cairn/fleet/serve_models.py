"""`cairn serve A B C`: a host of several models from its start to its end."""

import asyncio
import gc
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cairn.fleet.config import RouterConfig, ServerGroup
from cairn.fleet.model_host import ModelHost
from cairn.fleet.pulse_client import KEY
from cairn.fleet.router import Router
from cairn.fleet.server_process import share_router_secret


class HostConfig(NamedTuple):
    models: Sequence[str]
    flags: Sequence[str]  # of `cairn serve`, for each of them
    router: RouterConfig
    memory: int  # bytes that models may have together
    idle_s: float
    pinned: Sequence[str]
    on_gpu: bool
    with_keys: bool  # clients need one, so the host does, too


async def serve_models(config: HostConfig, say: Callable[[str], None], stop: asyncio.Event) -> None:
    """Until `stop` is set; raises what keeps a model from starting."""
    secret = secrets.token_hex(24)
    environment = {"CAIRN_HOST_SECRET": secret}
    if config.with_keys:
        keys = os.environ.get("CAIRN_API_KEYS")
        environment["CAIRN_API_KEYS"] = f"{keys},host {secret}" if keys else f"host {secret}"
        os.environ[KEY] = secret  # with which the router follows them
    share_router_secret()
    groups = [ServerGroup(model=model, args=list(config.flags)) for model in config.models]
    router = Router(config.router, [])
    host = ModelHost(
        groups,
        router,
        say,
        memory=config.memory,
        idle_s=config.idle_s,
        pinned=config.pinned,
        on_gpu=config.on_gpu,
        secret=secret,
        environment=environment,
    )
    router.starting = True
    address = await router.start()
    running = [
        asyncio.create_task(stop.wait()),
        asyncio.create_task(_run(host, router, address, say)),
    ]
    gc.freeze()
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await router.stop()
        await host.stop()


async def _run(host: ModelHost, router: Router, address: str, say: Callable[[str], None]) -> None:
    await host.start()
    router.starting = False
    say(f"ready: {', '.join(model.name for model in host.models)} at {address}")
    await host.run()


def run_models(config: HostConfig, say: Callable[[str], None]) -> None:
    """Run the models in an event loop until SIGTERM or Ctrl-C."""

    async def main() -> None:
        stop = asyncio.Event()
        for sign in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sign, stop.set)
        await serve_models(config, say, stop)

    import uvloop

    uvloop.run(main())
