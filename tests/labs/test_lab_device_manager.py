"""The device manager: a device has one lease at most, leases end, nobody waits for ever, and shares are fair."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import RequestError
from cairn.hw.machine import Gpu, Machine
from cairn.labs.projects._device_manager import Device, Manager, enumerate_devices, jain
from cairn.labs.projects.device_manager import simulate

CORES = [Device(f"cpu{number}", "cpu", number) for number in range(4)]
asks = st.tuples(
    st.sampled_from("abc"), st.integers(1, 4), st.floats(0.1, 5.0), st.floats(0, 3.0), st.booleans()
)


@given(st.lists(asks, max_size=30), st.booleans())
def test_whatever_is_asked(requests, fair):
    manager, now, granted = Manager(list(CORES), fair=fair), 0.0, {}
    steps = [*requests, *[None] * 200]
    for step in steps:
        if step is None:
            if not manager.waiting and not manager.leases:
                break
            now = manager.next_deadline() or now
        else:
            tenant, count, seconds, pause, early = step
            now += pause
            manager.ask(tenant, count, seconds, now)
            if early and manager.leases:
                manager.give_back(next(iter(manager.leases)), now)
        events = manager.advance(now)
        for lease in events.granted:
            granted[lease.number] = lease
        held = [device for lease in manager.leases.values() for device in lease.devices]
        assert len(held) == len(set(held))  # nobody shares
        assert sorted([*held, *manager.free]) == CORES  # nothing is lost
        assert all(lease.deadline > now for lease in manager.leases.values())
    assert len(granted) == len(requests)  # everybody had a turn
    assert all(len(granted[n + 1].devices) == ask[1] for n, ask in enumerate(requests))


def test_usage_is_what_was_held():
    manager = Manager(list(CORES))
    manager.ask("a", 2, 10.0, now=0.0)
    manager.ask("b", 1, 3.0, now=0.0)
    manager.advance(0.0)
    assert (manager.usage("a", 2.0), manager.usage("b", 2.0)) == (4.0, 2.0)
    manager.advance(8.0)  # looked at late: the lease of b ended at 3
    assert (manager.usage("a", 8.0), manager.usage("b", 8.0)) == (16.0, 3.0)
    manager.give_back(1, 9.0)
    manager.give_back(1, 9.5)  # twice changes nothing
    assert manager.usage("a", 20.0) == 18.0
    assert len(manager.free) == 4


@pytest.mark.parametrize(("count", "seconds"), [(0, 1.0), (5, 1.0), (1, 0.0), (1, float("nan"))])
def test_what_can_never_be_granted_is_refused(count, seconds):
    with pytest.raises(RequestError, match="a asks for"):
        Manager(list(CORES)).ask("a", count, seconds, now=0.0)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_shares_are_what_the_policy_says(devices):
    first = simulate(Manager(CORES[:devices], fair=False), 120)
    fair = simulate(Manager(CORES[:devices], fair=True), 120)
    assert first.greedy == pytest.approx(4 / 6, rel=0.1)
    assert fair.fairness == pytest.approx(1.0, abs=0.02)
    assert fair.greedy == pytest.approx(1 / 3, rel=0.05)
    assert first.busy == pytest.approx(1.0, abs=0.05)
    assert fair.busy == pytest.approx(1.0, abs=0.05)


def test_gpus_come_before_cores():
    gpus = [Gpu(index=n, name="H200", source="nvml", memory_bytes=1 << 37) for n in range(2)]
    assert [one.name for one in enumerate_devices(Machine(gpus=gpus), [0, 1])] == ["gpu0", "gpu1"]
    assert [one.name for one in enumerate_devices(Machine(), [3, 1])] == ["cpu1", "cpu3"]


def test_jain():
    assert jain([1, 1, 1]) == pytest.approx(1)
    assert jain([1, 0, 0]) == pytest.approx(1 / 3)
    assert jain([]) == 1.0
