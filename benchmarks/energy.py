"""Do the joules that a server bills its requests add up to those that its GPU has taken?

    python benchmarks/energy.py --start random:qwen3-8b --out benchmarks/h200/energy.json

    counter of the card, before  -->  requests of three sizes from a few clients  -->  counter of the card, after
    joules of all requests (/cairn/requests), and of nobody (/cairn/usage)         against the difference

The server reads the same counter once a second and shares it out, so what can go wrong is what it forgets: requests
that end between two readings, the rest behind the last one, a second in which nobody advanced. Waits for two further
readings before it looks. Says nothing about how a joule is shared between two requests of the same step.
"""

import argparse
import json
import random
import signal
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from cairn.bench.record import add_arguments, record
from cairn.bench.served import started
from cairn.core.errors import HardwareError
from cairn.hw.energy import open_energy
from cairn.serve.http.ledger.book import REMEMBERED

SIZES = ((64, 16), (512, 128), (2048, 64))  # tokens in and out
CLIENTS = 24
SETTLE_S = 2.5  # two ticks of the server's accounts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--start", default="random:qwen3-8b", help="model and flags for cairn serve"
    )
    parser.add_argument("--requests", type=int, default=240)
    add_arguments(parser)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the server would outlive it
    with ExitStack() as stack:
        counter = open_energy([0], stack)
        if counter is None or counter.joules() is None:
            raise HardwareError("no GPU here says how much energy it has taken")
        served = stack.enter_context(started([*options.start.split(), "--max-model-len", "4096"]))
        send(served.url, options.requests // 10)  # kernels and graphs of the first requests
        time.sleep(SETTLE_S)
        results = measured(served.url, options.requests, lambda: counter.joules() or 0.0)
    record(results, options)


def measured(url: str, count: int, joules: Any) -> dict[str, Any]:
    before, known = joules(), seen(url)
    began = time.monotonic()
    send(url, count)
    time.sleep(SETTLE_S)
    after, found = joules(), seen(url)
    taken = after - before
    billed = {name: found[name] - known[name] for name in found}
    return {
        "requests": count,
        "seconds": time.monotonic() - began,
        "joules_of_the_card": taken,
        "joules_of_requests": billed["requests"],
        "joules_of_keys": billed["keys"],
        "joules_of_nobody": billed["nobody"],
        "billed_of_taken": (billed["keys"] + billed["nobody"]) / taken,
        "requests_of_keys": billed["requests"] / billed["keys"],
    }


def seen(url: str) -> dict[str, float]:
    """Joules that the server has billed so far: its requests, its keys, and what was nobody's."""
    usage = ask(url, "/cairn/usage")
    rows = ask(url, f"/cairn/requests?limit={REMEMBERED}")["requests"]
    return {
        "requests": sum(row["joules"] or 0.0 for row in rows),
        "keys": sum(key["joules"] for key in usage["keys"]),
        "nobody": usage["idle_joules"],
    }


def send(url: str, count: int) -> None:
    draw = random.Random(count)
    sizes = [SIZES[place % len(SIZES)] for place in range(count)]
    bodies = [
        {
            "prompt": [draw.randint(0, 10_000) for _ in range(tokens_in)],
            "max_tokens": tokens_out,
            "ignore_eos": True,
        }
        for tokens_in, tokens_out in sizes
    ]
    with ThreadPoolExecutor(CLIENTS) as pool:
        for answer in pool.map(lambda body: ask(url, "/v1/completions", body), bodies):
            assert answer["usage"]["completion_tokens"]


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


if __name__ == "__main__":
    main()
