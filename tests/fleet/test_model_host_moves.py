"""A host of several models that cannot have its way: servers that refuse to sleep, are busy, or start again."""

import asyncio

import pytest

from cairn.core.errors import CairnError
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
        router.place_held = router.held.clear

    async def _call(self, model, method, path):
        self.called.append(f"{model.name}{path}")
        for refused, reason in self.refuses.items():
            if self.called[-1].startswith(refused):
                raise CairnError(reason)
        return b""

    def wants(self, name: str, looks: int = 1) -> list[str]:
        self.router.held[Held(name)] = None
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


def test_a_request_that_comes_after_the_plan_keeps_its_model_awake():
    host = Host()
    worker = host.router.workers[0]
    worker.waiting = 1
    assert not asyncio.run(host._sleep(host.models[0]))
    assert (host.called, worker.state, worker.yielding) == ([], "up", False)
