"""A node on Ray whose actor never answers again: what happens when the driver's own raylet is killed."""

import sys
from types import SimpleNamespace

import pytest

from cairn.cluster.backends import ray_placement
from cairn.cluster.backends.ray_placement import UNANSWERED_S, RayNode
from cairn.cluster.node_reservation import LOST


class FakeRay:
    """Calls are answered until it is silent; then they neither fail nor end."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self):
        self.silent, self.killed = False, []

    def wait(self, asked, timeout):
        return ([], asked) if self.silent else (asked, [])

    def get(self, asked):
        return asked

    def kill(self, actor, no_restart):
        self.killed.append(actor)


@pytest.fixture
def world(monkeypatch):
    fake, clock = FakeRay(), SimpleNamespace(now=0.0)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_placement.time, "monotonic", lambda: clock.now)
    return fake, clock


def test_an_actor_that_does_not_answer_any_more_is_a_lost_node(world, tmp_path):
    ray, clock = world
    actor = SimpleNamespace(look=SimpleNamespace(remote=lambda offset: (None, b"")))
    node = RayNode(lambda: (actor, 17), tmp_path / "log")
    assert [node.poll() for _ in range(3)] == [None] * 3  # it runs
    ray.silent = True
    clock.now += UNANSWERED_S - 1
    assert node.poll() is None
    clock.now += 2
    assert node.poll() == LOST
    assert ray.killed == [actor]


def test_a_node_that_waits_for_its_place_is_not_lost(world, tmp_path):
    ray, clock = world
    ray.silent = True
    node = RayNode(lambda: (object(), 17), tmp_path / "log")
    clock.now += 100 * UNANSWERED_S
    assert node.poll() is None
