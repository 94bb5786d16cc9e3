"""A host of several models that cannot have its way: servers that refuse to sleep, are busy, or start again."""

import asyncio
import http.client
import json

import pytest

from cairn.cli import serve
from cairn.core.errors import CairnError, ConfigError
from cairn.fleet.config import RouterConfig, ServerGroup
from cairn.fleet.model_host import ModelHost, SleepingSize
from cairn.fleet.router import Router
from cairn.fleet.worker import Worker
from cairn.serve.pulse import Hello

GIB = 1 << 30


class Held:
    """A request that waits for its model."""

    def __init__(self, model: str) -> None:
        self.model, self.arrived_s = model, 0.0


class Host(ModelHost):
    """Two models fit, of three; servers answer as `refuses` says."""

    def __init__(self) -> None:
        self.refuses: dict[str, str] = {}  # by the name of the model and the path
        self.called: list[str] = []
        self.sizes = b""
        groups = [ServerGroup(model=name) for name in "abc"]
        router = Router(RouterConfig(port=0), [])
        super().__init__(
            groups,
            router,
            lambda text: None,
            memory=2 * GIB,
            idle_s=1e9,
            pinned=[],
            on_gpu=False,
            secret="x",
            environment={},
        )
        for number, model in enumerate(self.models):
            worker = Worker(number, model.process.url)
            worker.up(Hello(1, [model.name], 16, True, 8))
            worker.managed = True
            router.workers.append(worker)
            model.size, model.used_s = SleepingSize(GIB, 0), float(number)
        self._running = [None] * 3
        self._worker(self.models[2]).fell_asleep()
        self.router = router
        router.place_waiting = lambda: [router.waiting.remove(one) for one in list(router.waiting)]

    async def _call(self, model, method, path):
        self.called.append(f"{model.name}{path}")
        for refused, reason in self.refuses.items():
            if self.called[-1].startswith(refused):
                raise CairnError(reason)
        return self.sizes

    def wants(self, name: str, looks: int = 1) -> list[str]:
        self.router.waiting.add(Held(name), name, "", 0)
        for _ in range(looks):
            asyncio.run(self.look())
        return [worker.state for worker in self.router.workers]


def test_the_one_that_was_used_longest_ago_sleeps():
    assert Host().wants("c") == ["asleep", "up", "up"]


def test_a_server_that_starts_again_is_left_alone():
    host = Host()
    host.router.workers[0].down("killed")
    assert host.wants("c") == ["down", "asleep", "up"]
    assert host.called == ["b/sleep?level=2", "c/wake_up"]


def test_after_a_refusal_another_one_sleeps():
    host = Host()
    host.refuses["a/sleep"] = "no"
    assert host.wants("c", looks=2) == ["up", "asleep", "up"]


@pytest.mark.parametrize("reason", ["packed weights", "no folder to read them from"])
def test_weights_that_cannot_be_dropped_are_kept(reason):
    host = Host()
    host.refuses["a/sleep?level=2"] = reason
    # It keeps its weights, so that there is no room for a third; the next one gives all of its memory back.
    assert host.wants("c", looks=2) == ["asleep", "asleep", "up"]
    assert [model.level for model in host.models] == [1, 2, 2]


def test_a_model_whose_first_sleep_fails_is_pinned_and_all_are_known_from_the_start():
    host, seen = Host(), []

    async def run() -> None:
        seen.append(len(host.router.workers))

    for model in host.models:
        model.process.run = run
    workers, host._running = host.router.workers[:], []
    host.router.workers.clear()
    host.router.use = lambda urls: host.router.workers.extend(workers[: len(urls)])
    for worker in workers:
        worker.woke_up()
    host.sizes = b'{"weights_bytes": 1073741824, "cache_bytes": 0}'
    host.refuses["a/sleep"] = "no"
    asyncio.run(host.start())
    assert seen == [3, 3, 3]
    assert [model.pinned for model in host.models] == [True, False, False]
    assert [worker.state for worker in workers] == ["up", "up", "asleep"]


def test_an_answer_that_is_no_http_is_a_reason_and_no_crash(monkeypatch):
    def refuse(self):
        raise http.client.BadStatusLine("SSH-2.0")

    host = Host()
    monkeypatch.setattr(http.client.HTTPConnection, "request", lambda *args, **fields: None)
    monkeypatch.setattr(http.client.HTTPConnection, "getresponse", refuse)
    with pytest.raises(CairnError, match=r"POST /sleep: SSH-2\.0"):
        host._ask(host.router.workers[0], "POST", "/sleep")


def test_flags_of_one_model_are_refused_and_limits_are_the_routers_too(monkeypatch):
    found = []
    monkeypatch.setattr(
        "cairn.fleet.serve_models.run_models", lambda config, _: found.append(config)
    )
    given = ["a", "b", "--device", "cpu", "--models-memory", "1GiB"]
    for flag in ("--capture", "--batch-folder"):
        with pytest.raises(ConfigError, match=f"{flag} is for one model"):
            serve.run([*given, flag, "x"])
    assert serve.run([*given, "--max-body-bytes", "77"]) == 0
    assert found[0].router.max_body_bytes == 77


def test_a_request_that_comes_after_the_plan_keeps_its_model_awake():
    host = Host()
    worker = host.router.workers[0]
    worker.waiting = 1
    assert not asyncio.run(host._sleep(host.models[0]))
    assert (host.called, worker.state, worker.yielding) == ([], "up", False)


def test_models_are_listed_before_all_of_them_have_started():
    """A client that asks early gets every name at once, and does not wait for a server that sleeps."""
    router = Host().router
    starting = Worker(2, "http://127.0.0.1:1")
    starting.promised = ("c",)
    router.workers[2] = starting
    status, _, body = router.views.answer(b"/v1/models")
    assert status == 200
    assert [one["id"] for one in json.loads(body)["data"]] == ["a", "b", "c"]
    _, _, body = router.views.answer(b"/api/tags")  # of Ollama's clients
    assert [one["model"] for one in json.loads(body)["models"]] == ["a", "b", "c"]
