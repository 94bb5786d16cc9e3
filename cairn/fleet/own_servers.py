"""Servers of a fixed number that the fleet starts itself, and exchanges for others without dropping anyone.

file says --start--> running          another file: new ones start beside the old (green beside blue)
                                        all are ready --> the router uses them; the old finish what they have
                                        one fails     --> the new ones end; the old go on as before
"""

import asyncio
from collections.abc import Callable, Sequence

from cairn.core.errors import CairnError
from cairn.fleet.config import FleetConfig, ServerGroup
from cairn.fleet.server_process import Gpus, ServerProcess

LOOK_S = 0.1


class OwnServers:
    def __init__(self, config: FleetConfig, say: Callable[[str], None], gpus: Gpus) -> None:
        self._say, self._gpus, self._made = say, gpus, 0
        self._groups = _fixed(config)
        self._processes = {at: self._make(group) for at, group in enumerate(self._groups)}
        self._running: dict[ServerProcess, asyncio.Task[None]] = {}

    @property
    def urls(self) -> list[str]:
        return [one.url for processes in self._processes.values() for one in processes]

    async def run(self) -> None:
        """Until it is cancelled; raises when a server never came up."""
        self._start([one for processes in self._processes.values() for one in processes])
        while True:
            for task in list(self._running.values()):
                if task.done():
                    task.result()
            await asyncio.sleep(LOOK_S)

    async def change(self, config: FleetConfig, use: Callable[[list[str]], None]) -> None:
        """These groups from now on; `use` gets their addresses once all are ready. A CairnError: all is as before."""
        groups, kept = _fixed(config), dict[int, list[ServerProcess]]()
        left = dict(enumerate(self._groups))
        for at, group in enumerate(groups):
            same = next((old for old, other in left.items() if other == group), None)
            if same is not None:
                del left[same]
                kept[at] = self._processes[same]
        fresh = await self._start_beside(
            {at: group for at, group in enumerate(groups) if at not in kept}
        )
        old = [one for at in left for one in self._processes[at]]
        self._groups = groups
        self._processes = {at: kept.get(at) or fresh[at] for at in range(len(groups))}
        use(self.urls)
        await self._end(old)

    async def stop(self) -> None:
        await self._end(list(self._running))

    async def _start_beside(self, groups: dict[int, ServerGroup]) -> dict[int, list[ServerProcess]]:
        """Ready, all of them; or none, with what kept one from it."""
        processes_of: dict[int, list[ServerProcess]] = {}
        try:
            for at, group in groups.items():
                processes_of[at] = self._make(group)
            every = [one for processes in processes_of.values() for one in processes]
            tasks = [asyncio.create_task(one.run()) for one in every]
            try:
                while not all(one.is_ready for one in every):
                    for task in tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(LOOK_S)
            except BaseException:  # the fleet stops meanwhile, too
                await asyncio.gather(*(one.stop() for one in every))
                await asyncio.gather(*tasks, return_exceptions=True)
                raise
        except BaseException:
            for one in [one for processes in processes_of.values() for one in processes]:
                self._gpus.give_back(one.gpus)
            raise
        self._running |= dict(zip(every, tasks, strict=True))
        return processes_of

    def _make(self, group: ServerGroup) -> list[ServerProcess]:
        processes: list[ServerProcess] = []
        for _ in range(group.count):
            name, own = f"server-{self._made}", self._gpus.take(group.gpus)
            if own is None:
                for one in processes:
                    self._gpus.give_back(one.gpus)
                raise CairnError(
                    f"{name} needs {group.gpus} GPUs, and {self._gpus.free} are free",
                    hint="fewer servers, or fewer `gpus`; servers that are exchanged need theirs beside the old ones'",
                )
            processes.append(ServerProcess(group, name, self._say, own))
            self._made += 1
        return processes

    def _start(self, processes: Sequence[ServerProcess]) -> None:
        self._running |= {one: asyncio.create_task(one.run()) for one in processes}

    async def _end(self, processes: Sequence[ServerProcess]) -> None:
        tasks = [self._running.pop(one) for one in processes]
        await asyncio.gather(*(one.stop() for one in processes))
        for one, task in zip(processes, tasks, strict=True):
            task.cancel()
            self._gpus.give_back(one.gpus)


def _fixed(config: FleetConfig) -> list[ServerGroup]:
    """Server groups without autoscaling."""
    return [group for group in config.servers if group.model and not group.scaled]
