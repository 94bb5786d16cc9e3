"""Servers of the fleet are exchanged for others under load: nobody is dropped, and a bad change changes nothing."""

import asyncio
import re
import sys
from pathlib import Path

import httpx
import pytest

from cairn.core.errors import CairnError
from cairn.fleet import serve
from cairn.fleet.config import FleetConfig, RouterConfig, ServerGroup
from cairn.fleet.own_servers import OwnServers
from cairn.fleet.serve import Fleet, Listeners
from cairn.fleet.server_process import Gpus, ServerProcess

HERE = str(Path(__file__).parent)
FAKE = """
import asyncio, sys, time
sys.path.insert(0, sys.argv[1])
from fake_servers import FakeServer
if sys.argv[3] == "absent":
    sys.exit("error: there is no such model")
if sys.argv[3] == "slow":
    time.sleep(600)
async def main():
    server = FakeServer(models=["chat"])
    server.port = int(sys.argv[2])
    await server.start()
    print(20_000 * "\\rmodel.safetensors: 50%|#####", file=sys.stderr)  # while it is loaded
    print("ready after 0 s", file=sys.stderr, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _fake_servers(monkeypatch):
    def command(self):
        return [sys.executable, "-c", FAKE, HERE, str(self.port), self._group.model]

    monkeypatch.setattr(ServerProcess, "command", property(command))


def config(*models: str, gpus: int = 0) -> FleetConfig:
    groups = [ServerGroup(model=model, gpus=gpus) for model in models]
    return FleetConfig(servers=groups, router=RouterConfig(port=0))


async def said(lines: list[str], pattern: str) -> str:
    async with asyncio.timeout(60):
        while True:
            for line in lines:
                if found := re.search(pattern, line, re.DOTALL):
                    lines.remove(line)
                    return found[1]
            await asyncio.sleep(0.01)


async def urls(client: httpx.AsyncClient, url: str) -> set[str]:
    shown = await client.get(f"{url}/cairn/fleet")
    return {one["url"] for one in shown.json()["servers"]}


def test_a_changed_file_starts_new_servers_beside_the_old_and_drops_nobody():
    async def check() -> None:
        lines, stop, reload = list[str](), asyncio.Event(), asyncio.Event()
        file = [config("one", "kept")]
        served = Fleet(file[0], lambda: file[0], Gpus([]), Listeners(), lines.append)
        await served.start()
        fleet = asyncio.create_task(served.run(stop, reload))
        url = await said(lines, r"^ready: 2 servers are up at (\S+)")
        statuses, done = list[int](), asyncio.Event()

        async def load(client: httpx.AsyncClient) -> None:
            while not done.is_set():
                asked = {"model": "chat", "prompt": "x", "max_tokens": 8, "stream": True}
                answer = await client.post(f"{url}/v1/completions", json=asked)
                statuses.append(answer.status_code)
                assert '"error"' not in answer.text

        async with httpx.AsyncClient(timeout=60) as client:
            clients = [asyncio.create_task(load(client)) for _ in range(3)]
            before = await urls(client, url)
            file[0] = config("absent", "kept")
            reload.set()
            reason = await said(lines, r"the file was not taken: (.*)")
            assert "there is no such model" in reason
            assert await urls(client, url) == before
            file[0] = config("kept", "two")
            reload.set()
            await said(lines, r"(the file was taken)")
            after = await urls(client, url)
            assert len(before & after) == 1  # the group that stayed
            assert len(after) == 2
            seen = len(statuses)
            while len(statuses) < seen + 6 and not any(one.done() for one in clients):
                await asyncio.sleep(0.01)
            done.set()
            await asyncio.gather(*clients)
        assert set(statuses) == {200}
        stop.set()
        await fleet

    asyncio.run(check())


def test_a_reload_that_is_cancelled_leaves_no_server_behind():
    async def check() -> None:
        gpus, made = Gpus(["0"]), list[ServerProcess]()
        own = OwnServers(config("one"), lambda text: None, gpus)
        make = own._make

        def remember(group: ServerGroup) -> list[ServerProcess]:
            made.extend(make(group))
            return list(made)

        own._make = remember
        change = asyncio.create_task(own.change(config("slow", gpus=1), lambda urls: None))
        while not made or made[0].pid is None:
            assert not change.done()
            await asyncio.sleep(0.01)
        change.cancel()
        await asyncio.gather(change, return_exceptions=True)
        assert made[0]._process.returncode is not None
        assert gpus.take(1) == ["0"]

    asyncio.run(check())


def test_without_gpus_for_both_nothing_changes_and_none_is_lost():
    async def check() -> None:
        gpus = Gpus(["0", "1", "2"])
        own = OwnServers(config("one", "two", gpus=1), lambda text: None, gpus)
        before = own.urls
        with pytest.raises(CairnError, match="needs 1 GPUs, and 0 are free"):
            await own.change(config("three", "four", gpus=1), lambda urls: None)
        assert own.urls == before
        assert gpus.take(1) == ["2"]

    asyncio.run(check())


def test_a_watched_file_is_read_again_when_its_contents_change(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "WATCH_S", 0.005)
    file = tmp_path / "fleet.toml"
    file.write_text("one")

    async def check() -> None:
        reload = asyncio.Event()
        watching = asyncio.create_task(serve.reload_on_change(file, reload))
        await asyncio.sleep(0)  # it has read the file
        assert not reload.is_set()
        file.unlink()  # as an editor or a volume does that puts another one in its place
        file.write_text("two")
        await asyncio.wait_for(reload.wait(), 10)
        watching.cancel()

    asyncio.run(check())
