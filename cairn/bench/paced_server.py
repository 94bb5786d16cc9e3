"""The whole server over an engine that only keeps time, in a thread of this process: something to load and to measure.

with PacedServer(opened, limits, lambda step: 0.005, max_waiting=64) as server:
    ... requests to server.url ...

`paced_apart` is the same with the engine in a process of its own, as on GPUs.
"""

import asyncio
import threading
from types import TracebackType
from typing import Any, Self, cast

from cairn.bench.paced_engine import StepSeconds, paced_serving
from cairn.bench.paced_worker import StepPace, paced_spawn
from cairn.models.runnable import OpenModel
from cairn.serve.config import EngineConfig
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.request import Limits
from cairn.serve.engine_processes import EngineProcesses
from cairn.serve.engine_thread import EngineThread
from cairn.serve.http.server.lifecycle import Server, address_of, bind
from cairn.serve.http.server.service import Service
from cairn.serve.http.server.settings import ServerConfig
from cairn.serve.serving import Serving

PATIENCE_S = 60
NAME = "paced"


class ServerThread:
    """Listens on a free port of loopback as soon as it is made."""

    def __init__(self, serving: Serving, **settings: Any) -> None:
        names = list(serving.models)
        config = ServerConfig(model=serving.name, port=0, served_model_name=names, **settings)
        bound = bind(config)
        self.url = address_of(bound)
        self.port = int(self.url.rpartition(":")[2])
        self.service = Service(config, serving)
        ready = threading.Event()
        self._server = Server(self.service, ready.set)
        self._thread = threading.Thread(target=self._server.run, args=([bound],), daemon=True)
        self._thread.start()
        if not ready.wait(PATIENCE_S):
            raise TimeoutError("the server did not start")

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the server."""
        assert self._server._loop is not None
        return self._server._loop

    def close(self) -> None:
        self._server.stop()
        self._thread.join(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class PacedServer(ServerThread):
    def __init__(
        self,
        opened: OpenModel,
        limits: Limits,
        step_seconds: StepSeconds,
        *,
        prefix_caching: bool = False,
        ahead_s: float = 0.0,
        **settings: Any,
    ) -> None:
        serving = paced_serving(opened, limits, step_seconds, NAME, prefix_caching, ahead_s)
        self.engine: Engine = cast(EngineThread, serving.engine).engine
        super().__init__(serving, **settings)


def paced_apart(opened: OpenModel, pace: StepPace, **settings: Any) -> ServerThread:
    """Its engine runs elsewhere, so there is no `engine` to look into."""
    config = EngineConfig(model=pace.model, device="cpu")
    processes = EngineProcesses(config, paced_spawn(pace))
    return ServerThread(Serving(opened, pace.limits, processes, names=[NAME]), **settings)
