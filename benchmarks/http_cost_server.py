"""The process that `http_cost.py` measures: the whole server over an engine that only keeps time.

    thread     the engine is a thread of this process, and its own cost is measured first
    process    the engine is a paced worker in a process of its own: real messages over ZeroMQ, and no cost here

Told by a pipe which layer to run; answers with its CPU time. What the layers are, `http_cost.py` says.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from cairn.bench.paced_engine import paced_engine
from cairn.bench.paced_server import PacedServer, ServerThread, paced_apart
from cairn.bench.paced_worker import StepPace, held_until
from cairn.core.garbage_collection import keep_what_is_loaded
from cairn.models.runnable import OpenModel, open_model
from cairn.serve.answer import Answer
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine_thread import EngineThread
from cairn.serve.http.server.api import Application
from cairn.serve.job import Job

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
ASKED = "Tell me about cairns."
log = logging.getLogger("http_cost")


class Load(msgspec.Struct, frozen=True):
    """Who asks for what."""

    streams: int
    tokens: int  # of each answer
    step_s: float
    endpoint: str = "chat"
    engine: str = "thread"  # or "process": where it runs

    @property
    def total(self) -> int:
        return self.streams * self.tokens

    def body(self) -> bytes:
        most = "max_output_tokens" if self.endpoint == "responses" else "max_tokens"
        body: dict[str, Any] = {
            most: self.tokens,
            "ignore_eos": True,
            "stream": True,
            "model": "paced",
        }
        if self.endpoint in ("chat", "messages"):
            body["messages"] = [{"role": "user", "content": ASKED}]
        else:
            body["prompt" if self.endpoint == "completions" else "input"] = ASKED
        return msgspec.json.encode(body)


class Reading(msgspec.Struct, frozen=True):
    """Of one run: what the process spent, and what came of it."""

    cpu_s: float
    wall_s: float
    events: int = 0


def measured(pipe: Connection, model: str, load: Load) -> None:
    """Until the pipe says stop."""
    opened = open_model(model)
    limits = Limits(rows=load.streams, step_tokens=64 * load.streams, context=4096,
                    pages=load.streams * (4096 // 16), page_size=16, vocabulary=opened.spec.vocab)  # fmt: skip
    layers = Layers(opened, limits, load)
    keep_what_is_loaded()
    pipe.send(layers.server.port)
    while (layer := pipe.recv()) != "stop":
        began, wall = time.process_time(), time.perf_counter()
        if layer == "socket":
            pipe.recv()  # the client has everything
            pipe.send(time.process_time() - began)
            continue
        getattr(layers, layer)()
        pipe.send(Reading(time.process_time() - began, time.perf_counter() - wall))
    layers.server.close()


class Nowhere:
    """A transport that drops what is written, and so shows what writing costs."""

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return False


class Layers:
    """A server, and as much of it as each layer needs."""

    def __init__(self, opened: OpenModel, limits: Limits, load: Load) -> None:
        self._opened, self._limits, self._load = opened, limits, load
        self._rounds = itertools.count()
        self.server: ServerThread
        if load.engine == "process":
            pace = StepPace(opened.name, limits, load.step_s, together=load.streams)
            self.server = paced_apart(opened, pace)
        else:
            self.server = PacedServer(opened, limits, lambda step: load.step_s)
            held_until(self.server.engine, load.streams)
        self._application = Application(self.server.service)

    def engine(self) -> None:
        """Nobody listens. One in another process costs nothing here."""
        if self._load.engine == "process":
            return
        engine = held_until(self._paced(), self._load.streams)
        for number in range(self._load.streams):
            engine.add(Request(number, [5] * 16, self._params()))
        engine.run()

    def detokenize(self) -> None:
        """Into text, which nobody takes."""
        if self._load.engine == "process":
            self._answer_all(self.server.service.serving.engine.submit)
            return
        engine = EngineThread(held_until(self._paced(), self._load.streams))
        self._answer_all(engine.submit)
        engine.close()

    def encode(self) -> None:
        """Through the application, whose bytes go nowhere."""
        asyncio.run_coroutine_threadsafe(self._ask_all(), self.server.loop).result()

    def _paced(self) -> Any:
        return paced_engine(self._opened, self._limits, lambda step: self._load.step_s)

    def _params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self._load.tokens, ignore_eos=True)

    def _answer_all(self, submit: Callable[[Sequence[Job]], None]) -> None:
        ended, params, round_ = threading.Semaphore(0), self._params(), next(self._rounds)

        def on_update(job: Job) -> None:
            if job.answer.finished:
                ended.release()

        submit([
            Job(Request(f"{round_}-{number}", [5] * 16, params), Answer(0, params, self._opened.tokenizer),
                self._load.tokens, on_update)
            for number in range(self._load.streams)
        ])  # fmt: skip
        for _ in range(self._load.streams):
            ended.acquire()

    async def _ask_all(self) -> None:
        await asyncio.gather(*[self._ask() for _ in range(self._load.streams)])

    async def _ask(self) -> None:
        body = [{"type": "http.request", "body": self._load.body(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            return body.pop() if body else await asyncio.Event().wait()  # type: ignore[return-value]

        path = PATHS[self._load.endpoint]
        scope: Any = {"type": "http", "method": "POST", "path": path, "headers": []}
        transport: Any = Nowhere()
        cycle = RequestResponseCycle(
            scope, transport, FlowControl(transport), log, log, False, [], asyncio.Event(), False, True,
            lambda: None,
        )  # fmt: skip
        await self._application(scope, receive, cycle.send)
