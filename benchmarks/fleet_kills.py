"""kill -9 of a random server of a fleet, again and again, under load: which requests fail, and which tokens differ?

    python benchmarks/fleet_kills.py --seconds 300 --every 5 --servers 4 --out benchmarks/cpu/fleet_kills_arm.json

Every prompt is answered once before the first kill; from then on clients ask for the same ones, greedy, half of them as
streams, and each answer has to be the same to the letter. A kill takes one of the servers that are up, however few they
are. With `--batch-invariant`, the default, an answer does not depend on who else is in its steps, so a difference can
only be a fault. Servers are forked from a process that has imported everything, because a start of `cairn serve` takes
seconds of both cores of a small machine, and then there is no load; `--cold` lets `cairn fleet serve` start them, as a
user would. Needs no GPU.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from cairn.bench.record import add_arguments, record

PATIENCE_S = 180.0
COLD = """[router]
port = 0
[[servers]]
model = "{model}"
count = {servers}
args = {args}
"""
WARM = """[router]
port = 0
[[servers]]
urls = {urls}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--model", default="cairn-tiny")
    parser.add_argument("--serve-args", default="--dtype float32 --batch-invariant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold", action="store_true", help="servers that the fleet starts")
    parser.add_argument(
        "--host", nargs="*", type=int, help="be the parent of servers on these ports"
    )
    add_arguments(parser)
    given = parser.parse_args()
    if given.host:
        host(given)
        return
    with fleet(given) as (url, log):
        record(asyncio.run(measure(given, url, log)), given)


def host(given: argparse.Namespace) -> None:
    """Fork a server for each port, and again whenever one of them ends."""
    import torch  # noqa: F401  so that children have it

    from cairn.cli.serve import run
    from cairn.models.runnable import open_model

    open_model(given.model)
    running: dict[int, int] = {}  # port by process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while True:
            for number, port in enumerate(given.host):
                if port not in running.values():
                    place = ["--host", "127.0.0.1", "--port", str(port)]
                    if (pid := os.fork()) == 0:
                        signal.signal(signal.SIGTERM, signal.SIG_DFL)
                        os._exit(run([given.model, *given.serve_args.split(), *place]))
                    running[pid] = port
                    print(f"server-{number} (process {pid})", flush=True)
            running.pop(os.wait()[0], None)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def fleet(given: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Its address, and the file that it writes to."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "fleet.toml", Path(folder) / "fleet.log"
        environment, hosts = {**os.environ, "OMP_NUM_THREADS": "1"}, []
        with log.open("a") as out:
            if given.cold:
                args = json.dumps(given.serve_args.split())
                file.write_text(COLD.format(model=given.model, servers=given.servers, args=args))
            else:
                ports = free_ports(given.servers)
                urls = json.dumps([f"http://127.0.0.1:{port}" for port in ports])
                file.write_text(WARM.format(urls=urls))
                own = ["--model", given.model, f"--serve-args={given.serve_args}"]
                parent = [sys.executable, __file__, *own, "--host", *map(str, ports)]
                hosts = [subprocess.Popen(parent, stdout=out, stderr=out, env=environment)]
            command = [sys.executable, "-m", "cairn", "fleet", "serve", str(file)]
            process = subprocess.Popen(command, stderr=out, env=environment)
        try:
            yield ready(process, log), log
        finally:
            for one in (process, *hosts):
                one.terminate()
                one.wait(PATIENCE_S)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends and process.poll() is None:
        if found := re.search(r"^ready: .* at (http://\S+)$", log.read_text(), re.MULTILINE):
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the fleet did not start: {log.read_text()[-2000:]}")


class Seen:
    """What became of the requests."""

    def __init__(self) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self.wrong: list[str] = []
        self.took_s: list[float] = []
        self.gaps_s: list[float] = []  # the longest one between two pieces of each stream


async def measure(given: argparse.Namespace, url: str, log: Path) -> dict[str, object]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        asks = [(at, bool(at % 2)) for at in range(given.prompts)]
        right = [await answer(client, given, *ask, Seen()) for ask in asks]
        seen, ends = Seen(), time.monotonic() + given.seconds
        kills = asyncio.create_task(killing(given, client, log, ends))
        clients = [
            asking(client, given, right, seen, random.Random(given.seed + at), ends)
            for at in range(given.clients)
        ]
        await asyncio.gather(*clients)
        killed = await kills
        shown = (await client.get("/cairn/fleet")).json()
    took, gaps = sorted(seen.took_s), sorted(seen.gaps_s)
    return {
        "seconds": given.seconds,
        "kills": len(killed),
        "servers up at a kill": {str(up): killed.count(up) for up in sorted(set(killed))},
        "answered": seen.answered,
        "failed": len(seen.failed),
        "wrong": len(seen.wrong),
        "moved": shown["moved"],
        "continued": sum(one["continued"] for one in shown["servers"]),
        "answer_s p50, p99, most": [round(at(took, share), 3) for share in (0.5, 0.99, 1)],
        "longest gap of a stream, s: p50, p99, most": [
            round(at(gaps, share), 3) for share in (0.5, 0.99, 1)
        ],
        "examples": (seen.failed + seen.wrong)[:8],
    }


async def asking(
    client: httpx.AsyncClient,
    given: argparse.Namespace,
    right: list[str],
    seen: Seen,
    draw: random.Random,
    ends: float,
) -> None:
    while time.monotonic() < ends:
        number = draw.randrange(len(right))
        began = time.monotonic()
        try:
            got = await answer(client, given, number, bool(number % 2), seen)
        except (httpx.HTTPError, RuntimeError, ValueError) as error:
            seen.failed.append(f"{number}: {error!r}"[:300])
            continue
        seen.answered += 1
        seen.took_s.append(time.monotonic() - began)
        if got != right[number]:
            seen.wrong.append(f"{number}: {got!r} instead of {right[number]!r}"[:600])


async def answer(
    client: httpx.AsyncClient, given: argparse.Namespace, number: int, stream: bool, seen: Seen
) -> str:
    prompt = f"The {number}th story is about a child who found {number + 2} things. One day"
    body = {"model": given.model, "prompt": prompt, "max_tokens": given.tokens, "temperature": 0,
            "stream": stream, "ignore_eos": True}  # fmt: skip
    if not stream:
        got = await client.post("/v1/completions", json=body)
        if got.status_code != 200:
            raise RuntimeError(f"status {got.status_code}: {got.text}")
        return got.json()["choices"][0]["text"]
    pieces, last, gap_s = [], time.monotonic(), 0.0
    async with client.stream("POST", "/v1/completions", json=body) as got:
        async for piece in got.aiter_bytes():
            now = time.monotonic()
            gap_s, last = max(gap_s, now - last), now
            pieces.append(piece)
    text = b"".join(pieces).decode()
    if got.status_code != 200 or '"error"' in text or not text.endswith("data: [DONE]\n\n"):
        raise RuntimeError(f"status {got.status_code}: {text[-300:]}")
    seen.gaps_s.append(gap_s)
    events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def killing(
    given: argparse.Namespace, client: httpx.AsyncClient, log: Path, ends: float
) -> list[int]:
    """How many were up at each kill."""
    draw, killed = random.Random(given.seed), list[int]()
    due = time.monotonic() + given.every
    while due < ends:
        await asyncio.sleep(due - time.monotonic())
        due += given.every
        shown = (await client.get("/cairn/fleet")).json()["servers"]
        up = [one["name"] for one in shown if one["state"] == "up"]
        if up:
            pids = re.findall(rf"{draw.choice(up)} \(process (\d+)\)", log.read_text())
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pids[-1]), signal.SIGKILL)
                killed.append(len(up))
    return killed


def at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


if __name__ == "__main__":
    main()
