"""A fleet that scales to zero: whoever asks waits until a server is up; it goes when nobody has asked for a while."""

import asyncio
import socket

import pytest
from fake_servers import FakeServer, text_of
from test_router import ask

from cairn.core.errors import CairnError
from cairn.fleet import autoscale
from cairn.fleet.autoscale import LocalScaler
from cairn.fleet.config import FleetConfig, RouterConfig, ServerGroup
from cairn.fleet.discovery import Discovery
from cairn.fleet.router import Router
from cairn.fleet.server_process import Gpus


class FakeProcess:
    """As `ServerProcess`, with a server in this process."""

    def __init__(self, group, name, say, gpus) -> None:
        self.server, self.name, self.gpus = FakeServer(models=group.names), name, gpus
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.server.port = probe.getsockname()[1]
        self.url = self.server.url

    async def run(self) -> None:
        await asyncio.sleep(0.1)
        await self.server.start()
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.server.kill()


def test_from_zero_to_zero(monkeypatch):
    monkeypatch.setattr(autoscale, "ServerProcess", FakeProcess)
    monkeypatch.setattr(autoscale, "TICK_S", 0.03)
    said: list[str] = []

    async def run() -> None:
        group = ServerGroup(model="fake", least=0, most=2, idle_s=0.6)
        config = FleetConfig(servers=[group], router=RouterConfig(port=0, hold_s=10))
        router = Router(config.router, [])
        discovery = Discovery(config, [], router.use)
        scaler = LocalScaler(group, router, discovery, said.append, Gpus([]))
        url = await router.start()
        scaling = asyncio.create_task(scaler.run())
        await asyncio.sleep(0.15)
        assert router.workers == []
        status, _, listed = router.views.answer(b"/v1/models")  # which starts no server
        assert (status, router.views.answer(b"/health")[0], b'"fake"' in listed) == (200, 200, True)
        answers = await asyncio.gather(*(ask(url, f"p{at}", 4, model="fake") for at in range(3)))
        assert [text for _, text, _ in answers] == [text_of(f"p{at}", 4) for at in range(3)]
        assert len(router.workers) == 1
        for _ in range(200):
            await asyncio.sleep(0.02)
            if not router.workers:
                break
        assert router.workers == []
        assert (await ask(url, "again", 4))[1] == text_of("again", 4)
        scaling.cancel()
        await router.stop(0.1)
        await scaler.stop()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert [line.split(": ")[1] for line in said] == [
        "0 servers become 1",
        "1 servers become 0",
        "0 servers become 1",
    ]


def test_a_server_that_cannot_start_ends_the_fleet_with_its_words(monkeypatch):
    class Broken(FakeProcess):
        async def run(self) -> None:
            raise RuntimeError("no such model")

    monkeypatch.setattr(autoscale, "ServerProcess", Broken)
    monkeypatch.setattr(autoscale, "TICK_S", 0.01)

    async def run() -> None:
        group = ServerGroup(model="fake", least=1, most=2)
        router = Router(RouterConfig(port=0), [])
        scaler = LocalScaler(
            group, router, Discovery(FleetConfig(servers=[group]), [], router.use), print, Gpus([])
        )
        await router.start()
        try:
            await scaler.run()
        finally:
            await router.stop(0.1)

    with pytest.raises(RuntimeError, match="no such model"):
        asyncio.run(asyncio.wait_for(run(), 10))


def test_one_model_that_cannot_start_leaves_the_others_alone(monkeypatch):
    """Who asks for it hears why, and its GPU is free again."""

    class Broken(FakeProcess):
        async def run(self) -> None:
            raise CairnError("no such model")

    monkeypatch.setattr(autoscale, "ServerProcess", Broken)
    monkeypatch.setattr(autoscale, "TICK_S", 0.01)
    said, gpus = [], Gpus(["7"])

    async def run() -> None:
        group = ServerGroup(model="fake", least=0, most=1, gpus=1)
        router = Router(RouterConfig(port=0, hold_s=0.3), [])
        discovery = Discovery(FleetConfig(servers=[group]), [], router.use)
        scaler = LocalScaler(group, router, discovery, said.append, gpus)
        url, scaling = await router.start(), asyncio.create_task(scaler.run())
        status, _, raw = await ask(url, "x", 3, model="fake")
        assert (status, scaling.done(), gpus.free) == (503, False, 1)
        assert b"(fake-1 could not be started: the fleet's log says why)" in raw
        scaling.cancel()
        await router.stop(0.1)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert said[1:] == ["error: no such model\nit is tried again in 1 s at the earliest"]


def test_each_model_is_started_when_it_is_asked_for_and_gpus_are_shared_out(monkeypatch):
    monkeypatch.setattr(autoscale, "ServerProcess", FakeProcess)
    monkeypatch.setattr(autoscale, "TICK_S", 0.03)

    async def run() -> None:
        groups = [
            ServerGroup(model=name, least=0, most=2, idle_s=0.5, gpus=1) for name in ("a", "b")
        ]
        router = Router(RouterConfig(port=0, hold_s=10), [])
        discovery = Discovery(FleetConfig(servers=groups), [], router.use)
        gpus = Gpus(["7"])
        scalers = [LocalScaler(group, router, discovery, print, gpus) for group in groups]
        url = await router.start()
        scaling = [asyncio.create_task(scaler.run()) for scaler in scalers]
        assert (await ask(url, "x", 3, model="a"))[1] == text_of("x", 3)
        assert [worker.hello.models for worker in router.workers] == [["a"]]
        # The only GPU is taken: b waits until a has been idle for long enough.
        assert (await ask(url, "y", 3, model="b"))[1] == text_of("y", 3)
        assert [worker.hello.models for worker in router.workers] == [["b"]]
        status, _, raw = await ask(url, "z", 3, model="c")
        assert status == 404
        assert b"there are: a, b" in raw
        for task in scaling:
            task.cancel()
        await router.stop(0.1)
        await asyncio.gather(*(scaler.stop() for scaler in scalers))

    asyncio.run(asyncio.wait_for(run(), 30))
