"""What does a streamed token cost the server, on top of its engine? CPU time, with an engine that only keeps time.

    python benchmarks/http_cost.py --out benchmarks/cpu/http_cost.json

One process runs the whole server over `paced_engine`; this one is its client. The server's own CPU time is what
counts, because a shared machine does not change it much. The same steps run four times, each with one part more, and
the differences are the parts' costs:

    engine         scheduler and loop, nobody listens
    + detokenize   text, stop strings
    + encode       the event loop, admission, events as bytes: an ASGI application whose bytes go nowhere
    + socket       uvicorn, HTTP/1.1, the kernel

paced: a step takes long enough that every token is an event of its own, as from a GPU. unpaced: tokens come as fast as
they can be made, and the server writes several at once where it is behind.
"""

import argparse
import asyncio
import logging
import multiprocessing
import select
import socket
import statistics
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from record import add_arguments, record
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from cairn.bench.paced_engine import paced_engine
from cairn.bench.paced_server import PacedServer
from cairn.models.runnable import OpenModel, open_model
from cairn.serve.answer import Answer
from cairn.serve.engine.loop import Engine, Output
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine_thread import EngineThread, Job
from cairn.serve.http.api import Application
from cairn.serve.http.lifecycle import keep_what_is_loaded

PACE_US = (
    60  # of a step, for each stream: a server may be a third of a core at most, or tokens merge
)
LOOK_S = 0.002
log = logging.getLogger("http_cost")
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class Load(msgspec.Struct, frozen=True):
    """Who asks for what."""

    streams: int
    tokens: int  # of each answer
    step_s: float
    endpoint: str = "chat"

    @property
    def total(self) -> int:
        return self.streams * self.tokens

    def body(self) -> bytes:
        body: dict[str, Any] = {"max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": "Tell me about cairns."}]
        else:
            body["prompt"] = "A cairn is"
        return msgspec.json.encode(body)


class Reading(msgspec.Struct, frozen=True):
    """Of one run: what the process spent, and what came of it."""

    cpu_s: float
    wall_s: float
    events: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="its tokenizer is used")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--endpoint", choices=list(PATHS), default="chat")
    parser.add_argument(
        "--woken", action="store_true", help="the client waits in poll, and every write wakes it"
    )
    parser.add_argument("--rounds", type=int, default=10)
    add_arguments(parser)
    options = parser.parse_args()
    results = []
    for streams in options.streams:
        for pace in ("paced", "unpaced"):
            step_s = PACE_US * 1e-6 * max(streams, 16) if pace == "paced" else 0.0
            load = Load(streams, options.tokens, step_s, options.endpoint)
            results.append(
                {"pace": pace} | measure(options.model, load, options.rounds, options.woken)
            )
            print(results[-1])
    record(results, options)


# -- putting the readings together ------------------------------------------------------------------


def measure(model: str, load: Load, rounds: int, woken: bool) -> dict[str, Any]:
    """The parts' costs in microseconds for each token: of the best round, because other work can only add to them."""
    names = ("engine", "detokenize", "encode", "socket")
    rows: list[list[Reading]] = []
    with Child(model, load, woken) as child:
        for _ in range(rounds + 1):  # the first one warms up
            rows.append([child.run(name) for name in names])
    columns = list(zip(*rows[1:], strict=True))
    spent = [[reading.cpu_s / load.total * 1e6 for reading in column] for column in columns]
    best = [min(column) for column in spent]
    usual = statistics.median(last - first for first, last in zip(spent[0], spent[-1], strict=True))
    parts = {f"{name}_us": best[at] - best[at - 1] for at, name in enumerate(names) if at}
    cost, streamed = best[-1] - best[0], columns[-1]
    return {
        "endpoint": load.endpoint, "streams": load.streams, "tokens_each": load.tokens, "woken": woken,
        "us_per_token": round(cost, 1), **{name: round(part, 1) for name, part in parts.items()},
        "median_us_per_token": round(usual, 1), "engine_us": round(best[0], 1),
        "tokens_per_core_s": round(1e6 / cost),
        "events_per_token": round(statistics.median(r.events for r in streamed) / load.total, 2),
        "wall_tokens_per_s": round(load.total / min(r.wall_s for r in streamed)),
    }  # fmt: skip


# -- the client -------------------------------------------------------------------------------------


class Client:
    """All streams in one thread, which looks at its sockets once in a while.

    Waiting in `epoll` instead would have every write of the server wake this process: on loopback the writer pays for
    that, over a network nobody does. `--woken` measures it all the same.
    """

    def __init__(self, port: int, load: Load, woken: bool) -> None:
        self._load, self._woken = load, woken
        self._poll = select.poll()
        self._open: dict[int, tuple[socket.socket, bytes]] = {}  # by descriptor: and its last bytes
        self.events = 0
        body = load.body()
        head = f"POST {PATHS[load.endpoint]} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        for _ in range(load.streams):
            made = socket.create_connection(("127.0.0.1", port))
            made.sendall(head.encode() + body)
            self._open[made.fileno()] = made, b""
            self._poll.register(made, select.POLLIN)

    def run(self) -> int:
        """Every stream to its last byte; how many events came."""
        while self._open:
            if not self._woken:
                time.sleep(LOOK_S)
            for number, _ in self._poll.poll(10_000):
                self._read(number)
        return self.events

    def _read(self, number: int) -> None:
        made, tail = self._open[number]
        data = made.recv(1 << 18)
        self.events += data.count(b"data: {")
        tail = (tail + data)[-32:]
        self._open[number] = made, tail
        if b"[DONE]" in tail or not data:
            if not data:
                raise ConnectionError(f"a stream ended early: {tail!r}")
            self._poll.unregister(made)
            made.close()
            del self._open[number]


class Child:
    """The measured process, as the client sees it."""

    def __init__(self, model: str, load: Load, woken: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._load, self._woken = load, woken
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=measured, args=(far, model, load), daemon=True)
        self._process.start()
        self._port: int = self._pipe.recv()

    def run(self, layer: str) -> Reading:
        self._pipe.send(layer)
        if layer != "socket":
            return self._pipe.recv()
        began = time.perf_counter()
        events = Client(self._port, self._load, self._woken).run()
        wall = time.perf_counter() - began
        self._pipe.send("done")
        return Reading(self._pipe.recv(), wall, events)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.send("stop")
        self._process.join(30)


# -- the measured process -----------------------------------------------------------------------------


def measured(pipe: Connection, model: str, load: Load) -> None:
    opened = open_model(model)
    limits = Limits(rows=load.streams, step_tokens=64 * load.streams, context=4096,
                    pages=load.streams * (4096 // 16), page_size=16, vocabulary=opened.spec.vocab)  # fmt: skip
    made = Measured(opened, limits, load)
    keep_what_is_loaded()
    pipe.send(made.server.port)
    while (layer := pipe.recv()) != "stop":
        began, wall = time.process_time(), time.perf_counter()
        if layer == "socket":
            pipe.recv()  # the client has everything
            pipe.send(time.process_time() - began)
            continue
        events = {"engine": run_engine, "detokenize": run_answers}.get(layer, made.run_application)(
            opened, limits, load
        )
        pipe.send(Reading(time.process_time() - began, time.perf_counter() - wall, events))
    made.server.close()


def together(engine: Engine, streams: int) -> Engine:
    """No step before all streams are there: fewer in a step would be more steps, and the engine's cost not the same."""
    step, started = engine.step, False

    def held() -> list[Output]:
        nonlocal started
        inside = engine.scheduler.running + engine.scheduler.waiting
        started = inside == streams or started
        if not started:
            time.sleep(0.001)
            return []
        outputs = step()
        started = engine.has_work
        return outputs

    engine.step = held  # type: ignore[method-assign]
    return engine


def run_engine(opened: OpenModel, limits: Limits, load: Load) -> int:
    engine = together(paced_engine(opened, limits, lambda step: load.step_s), load.streams)
    for number in range(load.streams):
        engine.add(
            Request(number, [5] * 16, SamplingParams(max_tokens=load.tokens, ignore_eos=True))
        )
    engine.run()
    return 0


def run_answers(opened: OpenModel, limits: Limits, load: Load) -> int:
    """Through the engine's thread into text, which nobody takes."""
    engine = EngineThread(
        together(paced_engine(opened, limits, lambda step: load.step_s), load.streams)
    )
    ended = threading.Semaphore(0)
    params = SamplingParams(max_tokens=load.tokens, ignore_eos=True)

    def on_news(job: Job) -> None:
        if job.answer.finished:
            ended.release()

    engine.submit([
        Job(Request(number, [5] * 16, params), Answer(0, params, opened.tokenizer), load.tokens, on_news)
        for number in range(load.streams)
    ])  # fmt: skip
    for _ in range(load.streams):
        ended.acquire()
    engine.close()
    return 0


class Nowhere:
    """A transport that drops what is written, and so shows what writing costs."""

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return False


class Measured:
    """A server, and its application without the sockets in the same event loop."""

    def __init__(self, opened: OpenModel, limits: Limits, load: Load) -> None:
        self.server = PacedServer(opened, limits, lambda step: load.step_s)
        together(self.server.engine, load.streams)
        self._application = Application(self.server.service)
        self._load = load

    def run_application(self, *_: object) -> int:
        return asyncio.run_coroutine_threadsafe(self._ask_all(), self.server.loop).result()

    async def _ask_all(self) -> int:
        await asyncio.gather(*[self._ask() for _ in range(self._load.streams)])
        return 0

    async def _ask(self) -> None:
        body = [{"type": "http.request", "body": self._load.body(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            return body.pop() if body else await asyncio.Event().wait()  # type: ignore[return-value]

        scope: Any = {
            "type": "http",
            "method": "POST",
            "path": PATHS[self._load.endpoint],
            "headers": [],
        }
        transport: Any = Nowhere()
        cycle = RequestResponseCycle(
            scope,
            transport,
            FlowControl(transport),
            log,
            log,
            False,
            [],
            asyncio.Event(),
            False,
            True,
            lambda: None,
        )
        await self._application(scope, receive, cycle.send)


if __name__ == "__main__":
    main()
