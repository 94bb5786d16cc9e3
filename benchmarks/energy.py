"""Do the joules that a server bills its requests add up to those that its GPU has taken?

    python benchmarks/energy.py --out benchmarks/h200/energy.json

    a tick of the accounts   -->   requests of three sizes from a few clients   -->   a tick of the accounts
    joules of these requests (/cairn/requests), of all keys and of nobody (/cairn/usage)
        against the energy counter of the card, and against its power read twenty times a second

The server reads the same counter once a second and shares it out, so what can go wrong is what it forgets: requests
that end between two readings, the rest behind the last one, a second in which nobody advanced. Both sides are read
right behind a tick. Says nothing about how a joule is shared between two requests of the same step.
"""

import argparse
import json
import random
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from cairn.bench.own_server import started
from cairn.bench.record import add_arguments, record, require_commit
from cairn.core.errors import HardwareError, UsageError
from cairn.hw.energy import EnergyCounter, open_energy
from cairn.hw.gpus import TorchMissing, gpus_from_torch
from cairn.serve.http.ledger.recent_ledgers import REMEMBERED

SIZES = ((64, 16), (512, 128), (2048, 64))  # tokens in and out
CLIENTS = 24
VOCABULARY = 10_000  # tokens of the prompts; every model has as many
VERDICT = ("keys_and_nobody_of_card", "requests_and_nobody_of_card")
WITHIN = 0.05  # of the card's counter
POLL_S = 0.02
POWER_S = 0.05
TICK_S = 30.0  # one comes every second; longer than this is none


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--start",
        default="random:qwen3-8b --device cuda --dtype bfloat16",
        help="model and flags for cairn serve",
    )
    parser.add_argument("--requests", type=int, default=480, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    add_arguments(parser)
    options = parser.parse_args()
    check(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the server would outlive it
    with ExitStack() as stack:
        counter = counter_of_first(stack)
        arguments = [*options.start.split(), "--max-model-len", "4096"]
        served = stack.enter_context(started(arguments))
        send(served.url, options.requests // 10, 0)  # kernels and graphs of the first requests
        rounds = [
            measured(served.url, options.requests, counter, number)
            for number in range(1, options.rounds + 1)
        ]
    worst = max(abs(1 - one[name]) for one in rounds for name in VERDICT)
    results = {"start": options.start, "rounds": rounds, "worst": worst, "within": WITHIN}
    record(results, options)
    if worst > WITHIN:
        sys.exit(f"the joules are off by {worst:.1%}, more than {WITHIN:.0%}")


def check(options: argparse.Namespace) -> None:
    require_commit(options.commit)
    if not 10 <= options.requests <= REMEMBERED:
        raise UsageError(
            f"--requests is {options.requests}",
            hint=f"give 10 to {REMEMBERED}: the server remembers no more",
        )


def counter_of_first(stack: ExitStack) -> EnergyCounter:
    """Of the card that torch sees first, on which the server runs."""
    try:
        uuid = gpus_from_torch()[0].uuid
    except TorchMissing as error:
        raise HardwareError(f"the energy of a GPU is measured here: {error}") from None
    counter = open_energy([uuid] if uuid else [], stack)
    if counter is None or counter.joules() is None:
        raise HardwareError(
            "no GPU here says how much energy it has taken", hint="pip install nvidia-ml-py"
        )
    return counter


def measured(url: str, count: int, counter: EnergyCounter, seed: int) -> dict[str, Any]:
    """One round: what the server billed for `count` requests beside what the card says."""
    known, before = at_tick(url, counter)
    began = time.monotonic()
    with integrated(counter) as power:
        send(url, count, seed)
        found, after = at_tick(url, counter)
    seconds = time.monotonic() - began
    taken = after - before
    billed = {name: found[name] - known[name] for name in found}
    requests = joules_of_newest(url, count)
    return {
        "requests": count,
        "seconds": seconds,
        "joules_of_card": taken,
        "joules_by_power": power[0],
        "joules_of_requests": requests,
        "joules_of_keys": billed["keys"],
        "joules_of_nobody": billed["nobody"],
        "keys_and_nobody_of_card": (billed["keys"] + billed["nobody"]) / taken,
        "requests_and_nobody_of_card": (requests + billed["nobody"]) / taken,
        "power_of_card": power[0] / taken,
    }


def at_tick(url: str, counter: EnergyCounter) -> tuple[dict[str, float], float]:
    """What was billed by a tick at which nobody was there any more, and the counter right behind it."""
    first = billed_so_far(url)
    end = time.monotonic() + TICK_S
    while time.monotonic() < end:
        now = billed_so_far(url)
        if now["nobody"] != first["nobody"]:
            return now, counter.joules() or 0.0
        time.sleep(POLL_S)
    raise HardwareError(f"the server has billed nothing for {TICK_S:g} s, while it was idle")


def billed_so_far(url: str) -> dict[str, float]:
    usage = ask(url, "/cairn/usage")
    if usage["idle_joules"] is None:
        raise HardwareError("the server knows nothing of its GPU's energy")
    return {
        "keys": sum(key["joules"] for key in usage["keys"]),
        "nobody": usage["idle_joules"],
    }


def joules_of_newest(url: str, count: int) -> float:
    rows = ask(url, f"/cairn/requests?limit={count}")["requests"]
    return sum(row["joules"] or 0.0 for row in rows)


@contextmanager
def integrated(counter: EnergyCounter) -> Generator[list[float]]:
    """Joules by the card's power over time, read in a thread until the block ends."""
    joules, over = [0.0], threading.Event()

    def read() -> None:
        last = time.monotonic()
        while True:
            done = over.wait(POWER_S)
            now = time.monotonic()
            joules[0] += (counter.watts() or 0.0) * (now - last)
            last = now
            if done:
                return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield joules
    finally:
        over.set()
        thread.join()


def send(url: str, count: int, seed: int) -> None:
    """`count` requests whose prompts no other `seed` has, so that no cache knows them."""
    draw = random.Random(seed)
    sizes = [SIZES[place % len(SIZES)] for place in range(count)]
    bodies = [
        {
            "prompt": [draw.randrange(VOCABULARY) for _ in range(tokens_in)],
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
