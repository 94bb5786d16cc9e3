"""What does a streamed token cost the server, on top of its engine? CPU time, with an engine that only keeps time.

    python benchmarks/http_cost.py --out benchmarks/cpu/http_cost.json

One process runs the whole server (`http_cost_server`); this one is its client. The server's own CPU time is what
counts, because a shared machine does not change it much. The same steps run four times, each with one part more, and
the differences are the parts' costs:

    engine         scheduler and loop, nobody listens; nothing where the engine has a process of its own
    + detokenize   text, stop strings; before them, what such a process says is received and read
    + encode       the event loop, admission, events as bytes: an ASGI application whose bytes go nowhere
    + socket       uvicorn, HTTP/1.1, the kernel

paced: a step takes long enough that every token is an event of its own, as from a GPU. unpaced: tokens come as fast as
they can be made, and the server writes several at once where it is behind.
"""

import argparse
import itertools
import multiprocessing
import select
import socket
import statistics
import time
from typing import Any

from http_cost_server import PATHS, Load, Reading, measured

from cairn.bench.record import add_arguments, record

# Of a step, for each stream: a server may be a third of a core at most, or tokens merge.
PACE_US = 60
LOOK_S = 0.002
ENGINES, PACES = ("thread", "process"), ("paced", "unpaced")
LAST = b"\r\n0\r\n\r\n"  # of a stream, as HTTP/1.1 frames it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="its tokenizer is used")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--endpoint", choices=list(PATHS), nargs="+", default=["chat"])
    parser.add_argument("--engine", choices=ENGINES, nargs="+", default=list(ENGINES))
    parser.add_argument("--pace", choices=PACES, nargs="+", default=list(PACES))
    parser.add_argument(
        "--woken", action="store_true", help="the client waits in poll, and every write wakes it"
    )
    parser.add_argument("--rounds", type=int, default=10)
    add_arguments(parser)
    options = parser.parse_args()
    results = []
    kinds = itertools.product(options.engine, options.endpoint, options.streams, options.pace)
    for engine, endpoint, streams, pace in kinds:
        step_s = PACE_US * 1e-6 * max(streams, 16) if pace == "paced" else 0.0
        load = Load(streams, options.tokens, step_s, endpoint, engine)
        found = measure(options.model, load, options.rounds, options.woken)
        results.append({"engine": engine, "pace": pace} | found)
        print(results[-1], flush=True)
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
        "endpoint": load.endpoint,
        "streams": load.streams,
        "tokens_each": load.tokens,
        "woken": woken,
        "us_per_token": round(cost, 1),
        **{name: round(part, 1) for name, part in parts.items()},
        "median_us_per_token": round(usual, 1),
        "engine_us": round(best[0], 1),
        "tokens_per_core_s": round(1e6 / cost),
        "events_per_token": round(statistics.median(r.events for r in streamed) / load.total, 2),
        "wall_tokens_per_s": round(load.total / min(r.wall_s for r in streamed)),
    }


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
        if tail.endswith(LAST) or not data:
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


if __name__ == "__main__":
    main()
