"""Servers of a router, and the tasks that follow them.

    use(urls) --new--> Worker, PulseClient (is it up, how busy, what is cached), BlockClient where it tells blocks
         '-----gone--> its tasks end, its keys are forgotten; what it has it finishes

A number is given again only when no request is at a server of that number any more: the index has a bit for each.
"""

import asyncio
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cairn.fleet.block_client import BlockClient
from cairn.fleet.config import BlockSource
from cairn.fleet.failing_servers import follow
from cairn.fleet.pulse_client import PulseClient
from cairn.fleet.worker import Worker

if TYPE_CHECKING:
    from cairn.fleet.exchange import Exchange
    from cairn.fleet.router import Router


class Membership:
    def __init__(self, router: "Router") -> None:
        self._router = router
        self.sources: dict[str, BlockSource] = {}  # by url: servers that tell blocks, as vLLM does
        self.blocks: dict[str, BlockClient] = {}  # by url
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}  # by url

    def use(self, urls: Sequence[str]) -> None:
        """These servers from now on."""
        router = self._router
        for worker in [one for one in router.workers if one.url not in urls]:
            self._remove(worker)
        known = {worker.url for worker in router.workers}
        for url in [url for url in dict.fromkeys(urls) if url not in known]:
            self._add(Worker(self._free_number(), url))

    def learn_blocks(self, exchange: "Exchange", chosen: Worker) -> None:
        """Fetch the tokens of a prompt from a server that reports blocks, if the prompt is new to it."""
        blocks = self.blocks.get(chosen.url)
        if blocks is not None and blocks.wants(exchange.keys):
            request, others = exchange.request, list(self.blocks.values())
            learning = blocks.learn(request.head.path, request.body, exchange.keys, others)
            self._router.spawn(learning)

    def _free_number(self) -> int:
        router = self._router
        in_use = {worker.number for worker in router.workers}
        in_use |= {one.worker.number for one in router.open if one.worker is not None}
        return next(at for at in itertools.count() if at not in in_use)

    def _add(self, worker: Worker) -> None:
        router, url, stall_s = self._router, worker.url, self._router.config.stall_s
        router.workers.append(worker)
        pulse = PulseClient(worker, router.index, stall_s)
        tasks = [pulse.run(), follow(router, pulse)]
        if (source := self.sources.get(url)) is not None:
            self.blocks[url] = blocks = BlockClient(worker, router.index, source, stall_s)
            tasks.append(blocks.run())
        self._tasks[url] = [router.spawn(task) for task in tasks]

    def _remove(self, worker: Worker) -> None:
        router = self._router
        router.workers.remove(worker)
        for task in self._tasks.pop(worker.url):
            task.cancel()
        self.blocks.pop(worker.url, None)
        router.index.forget(worker.number)
        router.pool.forget(worker.url)
