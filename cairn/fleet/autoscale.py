"""Servers of this machine that come and go with the load: asks the policy once a second, starts and stops processes.

    router: held, in flight, waits --LoadMeter--> Seen --decide--> more processes | one less | none

A server that is taken away gets nothing new from the router and finishes what it has.
"""

import asyncio
import time
from collections.abc import Callable

from cairn.fleet.config import ServerGroup
from cairn.fleet.discovery import Discovery
from cairn.fleet.processes import ServerProcess
from cairn.fleet.router import Router
from cairn.fleet.scale import Rules, decide
from cairn.fleet.worker import TOKEN_S

TICK_S = 1.0
USUAL_START_S = 20.0  # until one has been seen to start
ROWS = 64  # of a server that has not told


class LocalScaler:
    """Owns the processes of the group that is scaled."""

    def __init__(
        self, group: ServerGroup, router: Router, discovery: Discovery, say: Callable[[str], None]
    ) -> None:
        self.group, self._router, self._discovery, self._say = group, router, discovery, say
        self._running: dict[str, tuple[ServerProcess, asyncio.Task[None]]] = {}  # by url
        self._began_s: dict[str, float] = {}  # of servers that are not up yet
        self._start_s = USUAL_START_S
        self._ending: set[asyncio.Task[None]] = set()
        self._made = 0

    async def run(self) -> None:
        for _ in range(self.group.count if self.group.least else 0):
            await self._start()
        while True:
            await self.tick()
            await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        for _, task in self._running.values():
            if task.done():
                task.result()  # it never came up: the fleet ends with its words
        now, router = time.monotonic(), self._router
        workers = {one.url: one for one in router.workers if one.url in self._running}
        self._note_started(now)
        up = [one for one in workers.values() if one.state == "up"]
        waits = [one.queued_tokens * (one.load.token_s or TOKEN_S) for one in up]
        seen = router.meter.seen(
            now,
            ready=len(up),
            starting=len(self._running) - len(up),
            held=len(router.held),
            in_flight=len(router.open) - len(router.held),
            wait_s=min(waits, default=0.0),
        )
        target = decide(
            seen, self._rules(min((one.hello.rows for one in up if one.hello), default=ROWS))
        )
        if target != len(self._running):
            router.meter.changed_s = now
            self._say(
                f"{len(self._running)} servers become {target}: {seen.in_flight} requests run, {seen.held} wait"
            )
            for _ in range(target - len(self._running)):
                await self._start()
            for _ in range(len(self._running) - target):
                await self._stop_one()

    def _rules(self, rows: int) -> Rules:
        group = self.group
        return Rules(
            least=group.least or 0,
            most=group.most or 1,
            rows=rows,
            ttft_s=group.ttft_s,
            start_s=self._start_s,
            idle_s=group.idle_s,
        )

    def _note_started(self, now: float) -> None:
        for worker in self._router.workers:
            began = self._began_s.pop(worker.url, None) if worker.state == "up" else None
            if began is not None:
                self._start_s = now - began

    async def _start(self) -> None:
        name = f"server-{self._made}"
        self._made += 1
        process = ServerProcess(self.group, name, self._say)
        self._running[process.url] = process, asyncio.create_task(process.run())
        self._began_s[process.url] = time.monotonic()
        await self._show()

    async def _stop_one(self) -> None:
        """The one with the least to do."""
        busy = {one.url: one.waiting + one.decoding for one in self._router.workers}
        url = min(self._running, key=lambda one: busy.get(one, 0))
        process, _ = self._running.pop(url)
        await self._show()
        task = asyncio.create_task(process.stop())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _show(self) -> None:
        self._discovery.scaled = list(self._running)
        await self._discovery.look()

    async def stop(self) -> None:
        await asyncio.gather(
            *(process.stop() for process, _ in self._running.values()), *self._ending
        )
        for _, task in self._running.values():
            task.cancel()
