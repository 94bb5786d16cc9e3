"""A small device manager at work: how busy are the devices, how fair is it, and is a lease really a lease?

    simulated   three tenants, one of them greedy, on this machine's devices: first come first served against fair
    real        processes pinned to the device of their lease; one does not stop, and is ended at its deadline

With more work than devices every device should be busy all the time under both policies; the difference is who gets it.
Queueing says what the greedy tenant's share is: with first come its share of the requests, with fairness a third.
"""

import contextlib
import heapq
import os
import time
from typing import NamedTuple

from cairn.hw.probe import probe
from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.linux._partner import allowed_cpus, started
from cairn.labs.projects._device_manager import (
    Device,
    Events,
    Lease,
    Manager,
    enumerate_devices,
    jain,
)
from cairn.labs.workbench import Workbench

TENANTS = {"greedy": 4, "steady": 1, "small": 1}  # requests of each per round
HELD_S = 0.5  # the lease of the one that overstays
PATIENCE_S = 30.0  # the leases of the others


class Shares(NamedTuple):
    busy: float  # of all device time
    fairness: float  # Jain's index over the tenants
    greedy: float  # its share of what was used


def run(bench: Workbench) -> Outcome:
    devices = enumerate_devices(probe(), allowed_cpus())[:4]
    bench.step("a queue of requests, simulated twice")
    rounds = bench.setting("rounds", bench.pick(120, 40))
    first = simulate(Manager(devices, fair=False), rounds)
    fair = simulate(Manager(devices, fair=True), rounds)
    bench.step("real processes on real leases")
    ended, late_s, doubled = enforce(devices, bench.pick(HELD_S, HELD_S / 2))
    asked = TENANTS["greedy"] / sum(TENANTS.values())
    return Outcome(
        checks=[
            Check(
                what=Words("devices busy, fair", "公平策略的设备利用率"),
                predicted=1.0,
                measured=fair.busy,
                unit="of the time",
                within=0.05,
            ),
            Check(
                what=Words("greedy tenant's share, first come", "先来先服务时大户的份额"),
                predicted=asked,
                measured=first.greedy,
                unit="share",
                within=0.1,
            ),
            Check(
                what=Words("fairness of the fair policy (Jain)", "公平策略的 Jain 指数"),
                predicted=1.0,
                measured=fair.fairness,
                unit="",
                within=0.05,
            ),
            Check(
                what=Words("holders that had to be ended", "到期被终止的持有者"),
                predicted=1,
                measured=ended,
                unit="processes",
            ),
            Check(
                what=Words("devices that two had at once", "被同时占用的设备数"),
                predicted=0,
                measured=doubled,
                unit="devices",
            ),
        ],
        table=_table(first, fair),
        notes=[_note(devices, late_s)],
    )


def _table(first: Shares, fair: Shares) -> Table:
    return Table(
        columns=[
            Words("policy", "策略"),
            Words("devices busy", "设备利用率"),
            Words("fairness (Jain)", "公平性（Jain）"),
            Words("greedy tenant's share", "大户份额"),
        ],
        rows=[["first come", *first], ["fair", *fair]],
    )


def _note(devices: list[Device], late_s: float) -> Words:
    return Words(
        f"Devices: {', '.join(one.name for one in devices)}. The overdue holder was gone {late_s * 1e3:.0f} "
        f"ms "
        "after its deadline.",
        f"设备：{', '.join(one.name for one in devices)}。超期的持有者在到期后 {late_s * 1e3:.0f} "
        f"毫秒被终止。",
    )


def simulate(manager: Manager, rounds: int) -> Shares:
    """More requests than devices, in virtual time; measured over the stretch in which all tenants wait."""
    count = len(manager.devices)
    for _ in range(rounds):  # all are there from the start: the queue never runs dry
        for tenant, requests in TENANTS.items():
            for _ in range(requests):
                manager.ask(tenant, 1, 1.0, now=0.0)
    ends: list[tuple[float, int]] = []
    end = rounds * TENANTS["small"] * len(TENANTS) / count * 0.9  # until then everybody still waits
    now = 0.0
    while now < end:
        for lease in manager.advance(now).granted:
            heapq.heappush(ends, (lease.deadline, lease.number))
        now = ends[0][0]
        while ends and ends[0][0] <= now:
            heapq.heappop(ends)
    used = {tenant: manager.usage(tenant, now) for tenant in TENANTS}
    total = sum(used.values())
    return Shares(total / (count * now), jain(used.values()), used["greedy"] / total)


def enforce(devices: list[Device], seconds: float) -> tuple[int, float, int]:
    """Processes ended at their deadline, how late (s), and devices that two held at once (never)."""
    manager, ended, late, doubled = Manager(devices), 0, 0.0, 0
    for holder in range(len(devices) + 1):
        # The first works far longer than its lease; the others finish long before theirs ends.
        manager.ask(f"holder {holder}", 1, seconds if holder == 0 else PATIENCE_S, time.monotonic())
    with contextlib.ExitStack() as stack:
        running: dict[int, tuple[Lease, object]] = {}
        deadline = time.monotonic() + 2 * PATIENCE_S
        while (manager.waiting or running) and time.monotonic() < deadline:
            now = time.monotonic()
            events: Events = manager.advance(now)
            for lease in events.expired:
                process = running.pop(lease.number)[1]
                process.kill()  # type: ignore[attr-defined]
                process.wait(5)  # type: ignore[attr-defined]
                ended += 1
                late = max(late, time.monotonic() - lease.deadline)
            for lease in events.granted:
                blocks = 1 << 30 if lease.number == 1 else 1
                running[lease.number] = (lease, stack.enter_context(_worker(lease, blocks)))
            leased = [device for lease, _ in running.values() for device in lease.devices]
            doubled += len(leased) - len(set(leased))
            for number, (_, process) in list(running.items()):
                if process.poll() is not None:  # type: ignore[attr-defined]
                    del running[number]
                    manager.give_back(number, time.monotonic())
            time.sleep(0.01)
    return ended, late, doubled


@contextlib.contextmanager
def _worker(lease: Lease, blocks: int):  # noqa: ANN202  a generator of subprocess.Popen
    """A process on the core of its lease (a GPU's worker would get CUDA_VISIBLE_DEVICES), already at work."""
    device = lease.devices[0]
    cores = [device.index] if device.kind == "cpu" else list(os.sched_getaffinity(0))
    with started("burn", str(blocks), cpus=cores) as process:
        assert process.stdin is not None
        process.stdin.write(b"g")
        process.stdin.flush()
        yield process


LAB = described(__file__, run)
