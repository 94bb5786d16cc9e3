"""Servers of this machine that come and go with the load: asks the policy once a second, starts and stops processes.

    router: held, in flight, waits --LoadMeter--> Seen --decide--> more processes | one less | none

A server that is taken away gets nothing new from the router and finishes what it has. One that cannot be started is
tried again later, longer each time; the others go on. Only a group that should have servers from the beginning, and
whose first ones cannot be started, ends the fleet: that is a mistake in its file.
"""

import asyncio
import time
from collections.abc import Callable

from cairn.core.errors import CairnError
from cairn.fleet.config import ServerGroup
from cairn.fleet.discovery import Discovery
from cairn.fleet.placement import wait_s, waiting_for
from cairn.fleet.router import Router
from cairn.fleet.scaling_policy import Rules, ScaledModel, decide
from cairn.fleet.server_process import Gpus, ServerProcess

TICK_S = 1.0
USUAL_START_S = 20.0  # until one has been seen to start
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0  # after a server that could not be started
ROWS = 64  # of a server that has not told


class LocalScaler:
    """Owns the processes of the group that is scaled."""

    def __init__(
        self,
        group: ServerGroup,
        router: Router,
        discovery: Discovery,
        say: Callable[[str], None],
        gpus: Gpus,
    ) -> None:
        self.group, self._router, self._discovery, self._say = group, router, discovery, say
        self._gpus = gpus
        first = not router.scaled
        self._model = ScaledModel(group.names, time.monotonic(), first, group.ttft_s)
        router.scaled.append(self._model)
        self._running: dict[str, tuple[ServerProcess, asyncio.Task[None]]] = {}  # by url
        self._began_s: dict[str, float] = {}  # of servers that are not up yet
        self._start_s = USUAL_START_S
        self._was_up = False  # a server of this group, at any time
        self._retry_s, self._not_before_s = FIRST_RETRY_S, 0.0
        self._ending: set[asyncio.Task[None]] = set()
        self._made = 0

    async def run(self) -> None:
        for _ in range(self.group.least or 0):
            await self._start()
        while True:
            await self.tick()
            await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        now, router = time.monotonic(), self._router
        await self._drop_failed(now)
        workers = {one.url: one for one in router.workers if one.url in self._running}
        self._note_started(now)
        up = [one for one in workers.values() if one.state == "up"]
        seen = self._model.meter.seen(
            now,
            ready=len(up),
            starting=len(self._running) - len(up),
            held=waiting_for(router, self._model),
            in_flight=sum(one.waiting + one.decoding for one in workers.values()),
            wait_s=wait_s(router, self._model, up),
        )
        target = decide(
            seen, self._rules(min((one.hello.rows for one in up if one.hello), default=ROWS))
        )
        have = len(self._running)
        while len(self._running) < target and await self._start():
            pass
        while len(self._running) > target:
            await self._stop_one()
        if len(self._running) != have:
            self._model.meter.changed_s = now
            name, load = self._model.names[0], f"{seen.in_flight} requests run, {seen.held} wait"
            self._say(f"{name}: {have} servers become {len(self._running)}: {load}")

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
                self._start_s, self._was_up = now - began, True
                self._retry_s, self._model.problem = FIRST_RETRY_S, ""

    async def _drop_failed(self, now: float) -> None:
        """Servers that ended without ever having been ready."""
        for url, (process, task) in list(self._running.items()):
            if not task.done():
                continue
            try:
                task.result()
            except CairnError as error:
                if self.group.least and not self._was_up:
                    raise
                self._say(
                    f"error: {error}\nit is tried again in {self._retry_s:g} s at the earliest"
                )
                self._model.problem = (
                    f"{process.name} could not be started: the fleet's log says why"
                )
            del self._running[url]
            self._began_s.pop(url, None)
            self._gpus.give_back(process.gpus)
            self._not_before_s = now + self._retry_s
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            await self._show()

    async def _start(self) -> bool:
        """False: there is no GPU left for it, or the last one could not be started a moment ago."""
        if time.monotonic() < self._not_before_s:
            return False
        own = self._gpus.take(self.group.gpus)
        if own is None:
            return False
        self._made += 1
        name = f"{self._model.names[0]}-{self._made}"
        process = ServerProcess(self.group, name, self._say, own)
        self._running[process.url] = process, asyncio.create_task(process.run())
        self._began_s[process.url] = time.monotonic()
        await self._show()
        return True

    async def _stop_one(self) -> None:
        """The one with the least to do."""
        busy = {one.url: one.waiting + one.decoding for one in self._router.workers}
        url = min(self._running, key=lambda one: busy.get(one, 0))
        process, _ = self._running.pop(url)
        await self._show()
        task = asyncio.create_task(self._end(process))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, process: ServerProcess) -> None:
        await process.stop()
        self._gpus.give_back(process.gpus)

    async def _show(self) -> None:
        self._discovery.scaled[self._model.names[0]] = list(self._running)
        await self._discovery.look()

    async def stop(self) -> None:
        await asyncio.gather(
            *(process.stop() for process, _ in self._running.values()), *self._ending
        )
        for _, task in self._running.values():
            task.cancel()
