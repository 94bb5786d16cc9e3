"""Several models of one machine behind one address: each has a server of its own, and those sleep that have no room.

    request for A --router--> A is awake: sent        A sleeps: it waits; `residency.plan` --> POST /sleep, /wake_up

Servers start one after the other, each with the machine's memory to itself, and then sleep until they are asked for.
The host proves itself to them with a secret of its own, so that clients cannot put them to sleep.
"""

import asyncio
import http.client
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from cairn.core.errors import CairnError, ConfigError, did_you_mean
from cairn.core.units import format_bytes
from cairn.fleet.config import ServerGroup
from cairn.fleet.residency import Resident, check_room, plan
from cairn.fleet.router import Router
from cairn.fleet.server_process import ServerProcess
from cairn.fleet.worker import Worker

LOOK_S = 0.25
CALL_S = 120.0
Say = Callable[[str], None]


class SleepingSize(msgspec.Struct):
    """Response of GET /is_sleeping."""

    weights_bytes: int
    cache_bytes: int


class HostedModel:
    def __init__(self, process: ServerProcess, name: str, pinned: bool) -> None:
        self.process, self.name, self.pinned = process, name, pinned
        self.size = SleepingSize(0, 0)
        self.level = 2  # of its sleep; 1 where weights cannot be dropped
        self.used_s = 0.0


class ModelHost:
    def __init__(
        self,
        groups: Sequence[ServerGroup],
        router: Router,
        say: Say,
        *,
        memory: int,
        idle_s: float,
        pinned: Sequence[str],
        on_gpu: bool,
        secret: str,
        environment: Mapping[str, str],
    ) -> None:
        names = [group.names[0] for group in groups]
        for name in pinned:
            if name not in names:
                near = did_you_mean(name, names, otherwise=f"one of {', '.join(names)}")
                raise ConfigError(f"pin is {name!r}, and there is no such model", hint=near)
        if len({*names}) < len(names):
            raise ConfigError(f"two of the models have the same name: {', '.join(names)}")
        self._router, self._say, self._memory = router, say, memory
        self._idle_s, self._on_gpu, self._secret = idle_s, on_gpu, secret
        self.models = [
            HostedModel(
                ServerProcess(group, name, say, environment=environment), name, name in pinned
            )
            for group, name in zip(groups, names, strict=True)
        ]
        self._running: list[asyncio.Task[None]] = []
        self._held = asyncio.Event()
        router.on_waiting = self._held.set
        router.default_model = names[0]

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """All of them, one after the other; raises what keeps one from starting."""
        self._router.use([model.process.url for model in self.models])
        for model in self.models:
            worker = self._worker(model)
            worker.managed = worker.yielding = True
            worker.promised = (model.name,)
        for model in self.models:
            task = asyncio.create_task(model.process.run())
            self._running.append(task)
            worker = self._worker(model)
            while worker.state != "up":
                if task.done():
                    task.result()
                await asyncio.sleep(0.02)
            answer = await self._call(model, "GET", "/is_sleeping")
            model.size = msgspec.json.decode(answer, type=SleepingSize)
            if not model.pinned:
                await self._sleep(model)
                model.pinned = worker.state != "asleep"  # one that cannot sleep keeps its memory
            worker.yielding = False
        check_room(self._residents(), self._memory)
        for model in self.models:
            awake = sum(one.held for one in self._residents())
            if not model.pinned and awake + self._resident(model).given_back <= self._memory:
                await self._wake(model)

    async def run(self) -> None:
        """Until it is cancelled; raises when a server cannot be started again."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._held.wait()
            except TimeoutError:
                pass
            self._held.clear()
            for task in self._running:
                if task.done():
                    task.result()
            await self.look()

    async def look(self) -> None:
        moves = plan(self._residents(), self._memory, time.monotonic(), self._idle_s)
        for model in self.models:
            self._worker(model).yielding = model.name in moves.yielding
        asleep = [await self._sleep(self._named(name)) for name in moves.sleep]
        for name in moves.wake if all(asleep) else ():
            await self._wake(self._named(name))

    async def stop(self) -> None:
        await asyncio.gather(*(model.process.stop() for model in self.models))
        for task in self._running:
            task.cancel()

    # -- what is seen ----------------------------------------------------------------------------

    def _named(self, name: str) -> HostedModel:
        return next(model for model in self.models if model.name == name)

    def _worker(self, model: HostedModel) -> Worker:
        return next(one for one in self._router.workers if one.url == model.process.url)

    def _residents(self) -> list[Resident]:
        return [self._resident(model) for model in self.models[: len(self._running)]]

    def _resident(self, model: HostedModel) -> Resident:
        worker, names = self._worker(model), {model.name}
        names |= set(worker.hello.models) if worker.hello is not None else set()
        busy = worker.waiting + worker.decoding
        waiting = [one.arrived_s for one in self._router.waiting if one.model in names]
        if busy or waiting:
            model.used_s = time.monotonic()
        whole = model.size.weights_bytes + model.size.cache_bytes
        kept = 0 if self._on_gpu or model.level == 2 else model.size.weights_bytes
        return Resident(
            name=model.name,
            bytes=whole,
            asleep_bytes=kept,
            awake=worker.state != "asleep",
            pinned=model.pinned,
            answers=worker.state in ("up", "asleep"),
            busy=busy,
            waiting_since_s=min(waiting, default=None),
            used_s=model.used_s,
        )

    # -- what is done ----------------------------------------------------------------------------

    async def _sleep(self, model: HostedModel) -> bool:
        """Has it given back what was planned? One that refuses is the last that is asked again."""
        worker, planned = self._worker(model), model.level
        worker.yielding = True
        try:
            if busy := worker.waiting + worker.decoding:  # they came after the plan was made
                raise CairnError(f"{busy} requests are under way")
            model.level = await self._fall_asleep(model)
        except CairnError as error:
            model.used_s = time.monotonic()
            self._say(f"{model.name} does not sleep: {error}")
            return False
        finally:
            worker.yielding = False
        worker.fell_asleep()
        self._say(f"{model.name} sleeps: {format_bytes(self._resident(model).given_back)} are free")
        return model.level == planned

    async def _fall_asleep(self, model: HostedModel) -> int:
        """The level of its sleep: where weights cannot be dropped they are kept."""
        level = 1 if self._on_gpu else model.level
        try:
            await self._call(model, "POST", f"/sleep?level={level}")
        except CairnError:
            if level == 1:
                raise
            await self._call(model, "POST", "/sleep?level=1")
            return 1
        return model.level

    async def _wake(self, model: HostedModel) -> None:
        began, worker = time.monotonic(), self._worker(model)
        try:
            await self._call(model, "POST", "/wake_up")
        except CairnError as error:
            worker.reason = str(error)
            self._say(f"{model.name} does not wake up: {error}")
            return
        model.used_s = time.monotonic()
        worker.woke_up()
        self._say(f"{model.name} is awake after {time.monotonic() - began:.2f} s")
        self._router.place_waiting()

    async def _call(self, model: HostedModel, method: str, path: str) -> bytes:
        return await asyncio.to_thread(self._ask, self._worker(model), method, path)

    def _ask(self, worker: Worker, method: str, path: str) -> bytes:
        connection = http.client.HTTPConnection(worker.host, worker.port, timeout=CALL_S)
        headers = {"x-cairn-host": self._secret, "authorization": f"Bearer {self._secret}"}
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise CairnError(f"{method} {path}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        if answer.status != 200:
            said = body[:500].decode(errors="replace")
            raise CairnError(f"{method} {path} was answered with {answer.status}: {said}")
        return body
