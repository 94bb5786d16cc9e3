"""A server from its start to its end: bind, load, serve, drain.

    bind the port          taken already: refused before gigabytes move
    load, start            raises what is wrong with the model or the machine
    listen                 until SIGTERM or SIGINT
    drain                  new requests get a 503; those inside finish, or end with what they have after drain_timeout
    close the sockets      connections that are idle end
    close the engine       exit status 0; 1 where the engine has ended by itself, which the server survives by seconds

A second SIGINT ends the waiting. Knows nothing about endpoints.
"""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn

from cairn.core.errors import ConfigError
from cairn.core.garbage_collection import keep_what_is_loaded
from cairn.models.chat_template import CHATML, read_template
from cairn.serve.engine.messages import EngineFailed
from cairn.serve.engine.process import WorkerGroup
from cairn.serve.engine_processes import EngineProcesses
from cairn.serve.http.server.api import Application, More
from cairn.serve.http.server.early_workers import engine_config, in_processes
from cairn.serve.http.server.keys import Keys, check_admin_key, read_keys
from cairn.serve.http.server.service import Service
from cairn.serve.http.server.settings import ServerConfig
from cairn.serve.http.tools.tools import note_on_tools
from cairn.serve.media.fetch import MediaLoader
from cairn.serve.serving import Serving, open_serving, runs_on_gpu

BACKLOG = 2048
KEEP_ALIVE_S = 75
MARGIN_S = 5.0  # after the drain, for the last bytes
POLL_S = 0.05
# Turns of the event loop from a connection in the listener's queue to the task that answers it, and some more.
ACCEPT_TURNS = 10
log = logging.getLogger("cairn")


class Server(uvicorn.Server):
    """uvicorn, which drains on a signal and then returns instead of dying of it."""

    def __init__(
        self,
        service: Service,
        on_ready: Callable[[], None] = lambda: None,
        more: More = (),
    ) -> None:
        """`on_ready` is called once it answers; `more` is served beside the API."""
        config = service.config
        super().__init__(
            uvicorn.Config(
                Application(service, more),
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                ws="none",
                timeout_graceful_shutdown=int(config.drain_timeout + MARGIN_S),
            )
        )
        self.service, self._on_ready = service, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        service.on_death = self.stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_ready()

    async def main_loop(self) -> None:
        await super().main_loop()  # until `stop`
        await self._drain()

    async def _drain(self) -> None:
        """Go on listening until the last answer has ended: whoever comes meanwhile is told that the server stops.

        A closed listener would reset the connections in its queue, and look like a server that has crashed.
        """
        assert self._loop is not None
        self.server_state.default_headers = [
            *self.server_state.default_headers,
            (b"connection", b"close"),
        ]
        end = self._loop.time() + self.service.config.drain_timeout + MARGIN_S
        while self._loop.time() < end - 1 and not self.force_exit:
            for _ in range(ACCEPT_TURNS):
                await asyncio.sleep(0)
            if not self.server_state.tasks:
                break
            await asyncio.sleep(POLL_S)
        self.config.timeout_graceful_shutdown = max(int(end - self._loop.time()), 1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if (
            self.force_exit
        ):  # uvicorn leaves it out then, and the service would end as a cancelled task
            await self.lifespan.shutdown()

    def stop(self) -> None:
        """Begin to drain. Thread-safe."""
        self.should_exit = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.service.drain)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.stop()


HINTS = {
    errno.EADDRINUSE: "another program listens there; choose another --port, or 0 for a free one",
    errno.EACCES: "ports below 1024 need privileges; choose another --port",
}


def bind(config: ServerConfig) -> socket.socket:
    """A socket that does not listen yet: until the model is ready, connections are refused."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(
        socket, "TCP_USER_TIMEOUT"
    ):  # Linux: a client that never reads is disconnected by the kernel
        stall_ms = int(config.stall_timeout * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        hint = HINTS.get(error.errno or 0, "name an address of this machine with --host")
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}", hint=hint
        ) from None
    return listener


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def open_server(config: ServerConfig, early: WorkerGroup | None = None) -> Serving:
    """The model with its engine, and with the chat template that the server was given.

    `early`: workers that have been started for this configuration; they are ended if it needs none.
    """
    template = None if config.chat_template is None else read_template(config.chat_template)
    on_gpu = runs_on_gpu(config)
    engine, processes = engine_config(config, on_gpu), in_processes(config, on_gpu)
    serving = open_serving(
        engine, config.names, processes, config.separation, early, hang_timeout=config.hang_timeout
    )
    if early is not None and not isinstance(serving.engine, EngineProcesses):
        early.end()
    if template is not None:
        serving.tokenizer.use_template(template)
    else:
        _assume_template(serving)
    if serving.has_tokenizer and serving.tokenizer.templates:
        serving.notes.append(note_on_tools(serving.tokenizer.templates))
    if serving.picture_input is not None:
        serving.picture_input.loader = MediaLoader(config.media_hosts)
    return serving


def _assume_template(serving: Serving) -> None:
    """A GGUF file without a chat template gets ChatML, as from llama.cpp."""
    if not (serving.is_gguf and serving.has_tokenizer) or serving.tokenizer.templates:
        return
    tokenizer = serving.tokenizer
    begins = "{{ bos_token }}" if tokenizer.encode("")[:1] == [tokenizer.bos_id] else ""
    tokenizer.use_template(begins + CHATML)
    serving.assumed_template = True
    serving.notes.append(
        "the GGUF file has no chat template: conversations are written as ChatML; --chat-template FILE has another"
    )


def serve(
    config: ServerConfig,
    on_ready: Callable[[str, Serving], None] = lambda address, serving: None,
    keys: Keys | None = None,
    more: More = (),
    early: WorkerGroup | None = None,
) -> None:
    """Until it is stopped. `on_ready` gets the address once it answers; `more` is served beside the API.

    `early`: the engine's processes, where they have been started already; their end is the caller's to make sure.
    """
    if keys is None:
        keys = read_keys(config.api_key_file, admin_file=config.admin_key_file)
    check_admin_key(config.admin_endpoints, config.host, keys)
    if not keys and config.host not in ("127.0.0.1", "localhost", "::1"):
        log.warning("listening on %s without API keys: any client may use it", config.host)
    bound = bind(config)
    try:
        serving = open_server(config, early)
        keep_what_is_loaded()
        ready = partial(on_ready, address_of(bound), serving)
        service = Service(config, serving, keys)
        Server(service, ready, more).run([bound])
    finally:
        bound.close()
    if service.died is not None:
        raise EngineFailed(f"the engine is gone: {service.died}", hint="start the server again")
