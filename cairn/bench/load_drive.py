"""The two ways to put load on a server: open loop and closed loop.

    open loop     at the times of `arrivals`, whatever the server does: people do not wait for each other
    closed loop   N at a time, each followed by the next as soon as it ends: the server sets the pace

Only drives: how a request is sent is the sender's business, and the clock is the event loop's. With an event loop that
simulates time, this runs in no time and exactly.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from cairn.bench.load_answer import RequestRecord
from cairn.bench.load_prompts import LoadRequest

P = TypeVar("P")

Moved = Callable[[int, int], None]  # so many have ended, so many are in flight


class Sender(Protocol, Generic[P]):
    def prepare(self, ask: LoadRequest) -> P: ...

    async def send(self, prepared: P, due_s: float) -> RequestRecord: ...


def ignore(ended: int, in_flight: int) -> None:
    """Progress callback that does nothing."""


async def open_loop(
    sender: Sender[P],
    asks: Iterator[LoadRequest],
    arrivals: list[float],
    limit: int | None = None,
    moved: Moved = ignore,
) -> list[RequestRecord]:
    """Send one request for each arrival, at most `limit` at once; a request that waits for the limit counts as due."""
    loop = asyncio.get_running_loop()
    free = asyncio.Semaphore(limit) if limit is not None else None
    records: list[RequestRecord] = []
    sent = 0

    async def one(prepared: P, due_s: float) -> None:
        if free is None:
            records.append(await sender.send(prepared, due_s))
        else:
            async with free:
                records.append(await sender.send(prepared, due_s))
        moved(len(records), sent - len(records))

    begin_s = loop.time()
    async with asyncio.TaskGroup() as group:
        for arrival, ask in zip(arrivals, asks, strict=False):
            prepared = sender.prepare(ask)  # before it is due: this takes time
            await _sleep_until(begin_s + arrival)
            sent += 1
            group.create_task(one(prepared, begin_s + arrival))
    return records


async def closed_loop(
    sender: Sender[P],
    asks: Iterator[LoadRequest],
    concurrency: int,
    count: int | None = None,
    duration_s: float | None = None,
    moved: Moved = ignore,
) -> list[RequestRecord]:
    """Begins no request after `duration_s`, and at most `count`; those that run are waited for."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    records: list[RequestRecord] = []
    sent = 0

    async def worker() -> None:
        nonlocal sent
        while count is None or sent < count:
            if duration_s is not None and loop.time() - begin_s >= duration_s:
                return
            ask = next(asks, None)
            if ask is None:
                return
            sent += 1
            prepared = sender.prepare(ask)
            records.append(await sender.send(prepared, loop.time()))
            moved(len(records), sent - len(records))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return records


async def _sleep_until(moment: float) -> None:
    """Also where the moment has passed, others get their turn."""
    await asyncio.sleep(max(0.0, moment - asyncio.get_running_loop().time()))
