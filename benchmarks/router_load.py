"""What the whole router takes under two loads that are published for others: its process's CPU time and memory.

    python benchmarks/router_load.py --out benchmarks/cpu/router_load_arm.json

    many    500 requests a second of 200 tokens, 100 events of each answer streamed       (llm-d: 7.0 cores)
    long    10 requests a second of 100,000 tokens, each key of each prompt told          (llm-d: 8.8 cores, 10.5 GB)

Servers without a model stand behind it; those of `long` tell the keys of every prompt that they get, so the router has
exact knowledge. Clients, servers and router share this machine, so `many` runs at `--share` of its rate, and cores are
seconds of CPU for each request times the rate. A decision is the time from a request that has been read to its being
sent or queued: on a machine that others use that includes their turns, so its CPU time stands beside it. Needs no GPU.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cairn.bench.record import add_arguments, record
from cairn.fleet.measure.drive import cpu_s, free_port, rss_bytes, started

SERVERS = 4
MANY_PER_S, MANY_BYTES, MANY_EVENTS = 500, 800, 100
LONG_PER_S, LONG_BYTES, LONG_EVENTS, CONVERSATIONS = 10, 400_000, 20, 24
Text = Callable[[int, random.Random], str]  # of a prompt
FILE = "[router]\nport = {port}\n[[servers]]\nurls = {urls}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--share", type=float, default=0.1, help="of the rate of `many`")
    parser.add_argument("--route", type=Path, help="be the router of this file")
    parser.add_argument("--times", type=Path, help="where the router writes its decisions")
    add_arguments(parser)
    given = parser.parse_args()
    if given.route:
        route(given.route, given.times)
        return
    busy = os.getloadavg()[0]
    rate = MANY_PER_S * given.share
    many = measure(given.seconds, rate, MANY_EVENTS, lambda number, draw: words(draw, MANY_BYTES))
    long = measure(given.seconds, LONG_PER_S, LONG_EVENTS, conversation)
    many["cores at 500 requests/s"] = round(MANY_PER_S * many["cpu_ms_per_request"] / 1e3, 3)
    long["cores at 10 requests/s"] = round(LONG_PER_S * long["cpu_ms_per_request"] / 1e3, 3)
    record({"load_average_before": busy, "many": many, "long": long}, given)


def words(draw: random.Random, length: int) -> str:
    return "".join(draw.choices("abcdefgh ", k=length))


def conversation(number: int, draw: random.Random) -> str:
    """One of several, whose beginning is always the same, with another end."""
    which = number % CONVERSATIONS
    begun = words(random.Random(which), LONG_BYTES - 4000)
    return begun + words(draw, 4000)


def route(file: Path, times: Path) -> None:
    """`cairn fleet serve`, with a clock around every decision."""
    from cairn.cli.main import main as cairn
    from cairn.fleet.router import Router

    taken, handle = list[tuple[float, float]](), Router.handle

    def timed(self: Router, front: object, request: object) -> None:
        began, busy = time.perf_counter(), time.thread_time()
        handle(self, front, request)  # type: ignore[arg-type]
        taken.append((time.perf_counter() - began, time.thread_time() - busy))

    Router.handle = timed  # type: ignore[method-assign]
    try:
        cairn(["fleet", "serve", str(file)])
    finally:
        times.write_text(json.dumps(taken))


@contextlib.contextmanager
def fleet(events: int, folder: Path) -> Iterator[tuple[int, int]]:
    with contextlib.ExitStack() as stack:
        ports = [free_port() for _ in range(SERVERS)]
        server = [sys.executable, "-m", "cairn.fleet.measure.mock_server"]
        for port in ports:
            stack.enter_context(started([*server, str(port), str(events)], port))
        port, file = free_port(), folder / "fleet.toml"
        urls = json.dumps([f"http://127.0.0.1:{one}" for one in ports])
        file.write_text(FILE.format(port=port, urls=urls))
        own = ["--route", str(file), "--times", str(folder / "times.json")]
        process = subprocess.Popen([sys.executable, __file__, *own], stderr=subprocess.DEVNULL)
        try:
            yield port, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def measure(seconds: float, rate: float, events: int, text: Text) -> dict[str, float]:
    draw, count = random.Random(0), int(seconds * rate)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with fleet(events, folder) as (port, pid):
            found = asyncio.run(drive(port, pid, rate, count, events, text, draw))
        taken = json.loads((folder / "times.json").read_text())[-count:]
    for name, times in zip(("decision", "decision_cpu"), zip(*taken, strict=True), strict=True):
        ordered = sorted(times)
        found[f"{name}_ms_p50"] = round(1e3 * ordered[len(ordered) // 2], 3)
        found[f"{name}_ms_p99"] = round(1e3 * ordered[int(0.99 * len(ordered))], 3)
    return found


async def drive(
    port: int, pid: int, rate: float, count: int, events: int, text: Text, draw: random.Random
) -> dict[str, float]:
    await until_up(port)
    await asyncio.gather(*(ask(port, text(at, draw), events) for at in range(20)))
    before, began = cpu_s(pid), time.monotonic()
    asks = []
    for at in range(count):
        await asyncio.sleep(max(began + at / rate - time.monotonic(), 0))
        asks.append(asyncio.create_task(ask(port, text(at, draw), events)))
    cached = await asyncio.gather(*asks)
    spent, took = cpu_s(pid) - before, time.monotonic() - began
    shown = await get(port, "/cairn/fleet")
    return {
        "requests": count,
        "seconds": round(took, 1),
        "requests_per_s": round(count / took, 1),
        "cpu_ms_per_request": round(1e3 * spent / count, 3),
        "cpu_share": round(spent / took, 3),
        "rss_mb": round(rss_bytes(pid) / 1e6, 1),
        "keys": shown["keys"],
        "answered_whole": sum(cached),
    }


async def until_up(port: int) -> None:
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        with contextlib.suppress(OSError, ValueError):
            if all(one["state"] == "up" for one in (await get(port, "/cairn/fleet"))["servers"]):
                return
        await asyncio.sleep(0.2)
    raise TimeoutError("the servers are not up")


async def get(port: int, path: str) -> dict:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


async def ask(port: int, text: str, events: int) -> bool:
    """Was the answer whole?"""
    body = json.dumps({"model": "mock", "max_tokens": events, "stream": True,
                       "messages": [{"role": "user", "content": text}]}).encode()  # fmt: skip
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(head % len(body) + body)
    answer = await reader.readuntil(b"[DONE]\n\n")
    writer.close()
    return answer.count(b"data: {") == events


if __name__ == "__main__":
    main()
