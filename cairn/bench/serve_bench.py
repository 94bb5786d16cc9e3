"""Load test of a server: one point per rate or concurrency, after a warm-up.

    server --ask for its model--> --warm-up, alone, then under load-->
        point: arrivals + prompts -> drive -> records -> Row --> ServeReport

The first request goes alone: a server that refuses it ends the run with its own words. Every point draws prompts that
no other point has, so nothing is found in a prefix cache but what the prompts of a trace share. Prints nothing.
"""

import asyncio
import gc
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from cairn.bench.load_answer import RequestRecord
from cairn.bench.load_client import LoadClient
from cairn.bench.load_drive import closed_loop, open_loop
from cairn.bench.load_row import LoadRow, summarize
from cairn.bench.load_setup import LoadLevel, LoadSetup, describe, due_times, prompts
from cairn.core.errors import CairnError, system_words

TICK_S = 0.25
WARM_PLACE = -2  # the number of the warm-up among the points, so that its prompts are its own


class LoadProgress(NamedTuple):
    load: str
    ended: int
    in_flight: int
    total: int | None
    elapsed_s: float
    duration_s: float | None  # where time alone ends it

    @property
    def share(self) -> float:
        """Done of the whole, 0 to 1; of two ends the nearer one counts."""
        shares = [0.0]
        if self.total:
            shares.append(self.ended / self.total)
        if self.duration_s:
            shares.append(self.elapsed_s / self.duration_s)
        return min(max(shares), 1.0)

    @property
    def left_s(self) -> float | None:
        """If it goes on like this; None before anything has ended."""
        return self.elapsed_s * (1 / self.share - 1) if self.share > 0 else None


Watch = Callable[[LoadProgress], None]


async def find_model(client: LoadClient) -> str:
    """The first model that the server names."""
    url = client.target.url
    try:
        status, body = await client.get("/v1/models")
    except (OSError, TimeoutError) as error:
        raise CairnError(
            f"no answer from {url}: {system_words(error)}", hint="is the server running?"
        ) from None
    try:
        names = [entry["id"] for entry in msgspec.json.decode(body)["data"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        names = []
    if status != 200 or not names:
        raise CairnError(
            f"{url}/v1/models names no model (status {status})", hint="name it with --model"
        )
    return names[0]


async def find_vocabulary(client: LoadClient) -> int | None:
    """Vocabulary size of a Cairn server; None for other servers."""
    try:
        status, body = await client.get("/cairn/model")
        return int(msgspec.json.decode(body)["vocabulary"]) if status == 200 else None
    except (OSError, TimeoutError, msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None


async def warm_up(client: LoadClient, setup: LoadSetup) -> None:
    """Send one request, which must succeed, then the others concurrently."""
    asks = prompts(setup, -1)
    clock = asyncio.get_running_loop().time
    first = await client.send(client.prepare(next(asks)), clock())
    if first.error is not None:
        hint = "is the server running?" if first.error == "refused" else None
        if first.error == "http 400" and setup.form == "tokens":
            hint = "a model with few tokens needs --vocab, one with a short context --input-len"
        raise CairnError(
            f"{setup.target.url} does not answer the first request: {first.error}: {first.detail}",
            hint=hint or "see the log of the server",
        )
    rest = max(0, setup.warmup - 1)
    if rest:
        await closed_loop(client, asks, concurrency=rest, count=rest)


async def warm_up_under(
    client: LoadClient, setup: LoadSetup, load: LoadLevel, watch: Watch | None = None
) -> None:
    """Apply the first point's load for `warmup_s` without recording it, so that caches, graphs and clocks settle."""
    if setup.warmup_s <= 0:
        return
    shorter = msgspec.structs.replace(setup, duration_s=setup.warmup_s, count=None)
    if due_times(shorter, load) != []:  # at a low rate there may be no arrival in so short a time
        await measure(client, shorter, load, WARM_PLACE, watch)


async def measure(
    client: LoadClient,
    setup: LoadSetup,
    load: LoadLevel,
    place: int = 0,
    watch: Watch | None = None,
) -> tuple[LoadRow, list[RequestRecord]]:
    """Measure one point. `place` is its index in the sweep, which selects its prompts."""
    due = due_times(setup, load)
    total = len(due) if due is not None else setup.count
    loop = asyncio.get_running_loop()
    ends_s = setup.duration_s if due is None else None
    state = (0, 0)

    def moved(ended: int, in_flight: int) -> None:
        nonlocal state
        state = ended, in_flight

    async def tick() -> None:
        while watch is not None:
            elapsed_s = loop.time() - began_s
            watch(LoadProgress(words, state[0], state[1], total, elapsed_s, ends_s))
            await asyncio.sleep(TICK_S)

    words = describe(load, setup)
    asks = prompts(setup, place)
    gc.collect()
    gc.disable()  # a pause of the client is not one of the server
    cpu_s, began_s = time.process_time(), loop.time()
    ticking = asyncio.create_task(tick())
    try:
        if due is not None:
            records = await open_loop(client, asks, due, setup.limit, moved)
        else:
            assert load.concurrency is not None
            records = await closed_loop(
                client, asks, load.concurrency, setup.count, setup.duration_s, moved
            )
    finally:
        gc.enable()
        ticking.cancel()
    cpu = (time.process_time() - cpu_s) / max(loop.time() - began_s, 1e-9)
    if not records:
        raise CairnError(
            f"no request came within {setup.duration_s} s at {words}",
            hint="use a longer --duration, or --num-requests",
        )
    return summarize(setup, load, records, cpu), records
