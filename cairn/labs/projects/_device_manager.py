"""A device manager in user space: what is there, who has it, who is next, and when it is taken back.

    enumerate ──> [gpu0 gpu1 | cpu0 cpu1]         what the machine has (GPUs, or cores where there are none)
    ask(tenant, count, seconds) ──> queue ──grant──> Lease(devices, deadline)
                                     ^                  │ give_back, or the deadline has passed: taken back
                                     └── least used tenant first, then the oldest

The policy is pure: no clock, no process, no driver inside; the caller says what time it is and acts on what comes
back. A device has one lease at most; a lease ends at its deadline whatever its holder does; no waiting job can be
overtaken for ever, because waiting makes the others more used.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cairn.core.errors import RequestError
from cairn.hw.machine import Machine


class Device(NamedTuple):
    name: str  # "gpu0", "cpu3"
    kind: Literal["gpu", "cpu"]
    index: int  # of the GPU, or of the core
    memory_bytes: int | None = None


class Ask(NamedTuple):
    number: int
    tenant: str
    count: int
    seconds: float  # how long it may keep them
    since: float


class Lease(NamedTuple):
    number: int  # of the request
    tenant: str
    devices: tuple[Device, ...]
    began: float
    deadline: float


class Events(NamedTuple):
    """The changes of one moment: the caller ends the processes of `expired` and starts those of `granted`."""

    granted: list[Lease]
    expired: list[Lease]


def enumerate_devices(machine: Machine, cores: Iterable[int]) -> list[Device]:
    """Its GPUs; where there are none, the cores that may be used play them."""
    if machine.gpus:
        return [
            Device(f"gpu{gpu.index}", "gpu", gpu.index, gpu.memory_bytes) for gpu in machine.gpus
        ]
    return [Device(f"cpu{core}", "cpu", core) for core in sorted(cores)]


@dataclass
class Manager:
    devices: list[Device]
    fair: bool = True  # False: first come, first served
    free: list[Device] = field(init=False)
    waiting: list[Ask] = field(default_factory=list)
    leases: dict[int, Lease] = field(default_factory=dict)
    used_s: dict[str, float] = field(default_factory=dict)  # device seconds of leases that ended
    _numbers: int = 0

    def __post_init__(self) -> None:
        self.free = list(self.devices)

    def ask(self, tenant: str, count: int, seconds: float, now: float) -> Ask:
        """Puts a request into the queue; what can never be granted is refused at once."""
        if not 1 <= count <= len(self.devices):
            raise RequestError(
                f"{tenant} asks for {count} of {len(self.devices)} devices",
                hint=f"ask for 1 to {len(self.devices)}",
            )
        if not seconds > 0:
            raise RequestError(f"{tenant} asks for {seconds} s", hint="a lease lasts some time")
        self._numbers += 1
        ask = Ask(self._numbers, tenant, count, seconds, now)
        self.waiting.append(ask)
        return ask

    def advance(self, now: float) -> Events:
        """Takes back what is overdue, then grants what can be granted."""
        expired = [lease for lease in self.leases.values() if lease.deadline <= now]
        for lease in expired:
            self._end(lease, now)
        granted = []
        while (ask := self._next(now)) is not None and ask.count <= len(self.free):
            granted.append(self._grant(ask, now))
        return Events(granted, expired)

    def give_back(self, number: int, now: float) -> None:
        """The holder has finished early; twice, or after the deadline, changes nothing."""
        lease = self.leases.get(number)
        if lease is not None:
            self._end(lease, now)

    def next_deadline(self) -> float | None:
        return min((lease.deadline for lease in self.leases.values()), default=None)

    def usage(self, tenant: str, now: float) -> float:
        """Device seconds that a tenant has had, running leases included."""
        running = sum(
            len(lease.devices) * (now - lease.began)
            for lease in self.leases.values()
            if lease.tenant == tenant
        )
        return self.used_s.get(tenant, 0.0) + running

    def _next(self, now: float) -> Ask | None:
        """Who is first. A large request that does not fit yet keeps its place: small ones do not slip past it."""
        if not self.waiting:
            return None
        by_age: Callable[[Ask], tuple[float, ...]] = lambda ask: (ask.since, ask.number)  # noqa: E731
        if not self.fair:
            return min(self.waiting, key=by_age)
        used = {tenant: self.usage(tenant, now) for tenant in {ask.tenant for ask in self.waiting}}
        return min(self.waiting, key=lambda ask: (used[ask.tenant], *by_age(ask)))

    def _grant(self, ask: Ask, now: float) -> Lease:
        self.waiting.remove(ask)
        taken, self.free = tuple(self.free[: ask.count]), self.free[ask.count :]
        lease = Lease(ask.number, ask.tenant, taken, now, now + ask.seconds)
        self.leases[ask.number] = lease
        return lease

    def _end(self, lease: Lease, now: float) -> None:
        del self.leases[lease.number]
        self.free.extend(lease.devices)
        spent = len(lease.devices) * (min(now, lease.deadline) - lease.began)
        self.used_s[lease.tenant] = self.used_s.get(lease.tenant, 0.0) + spent


def jain(shares: Iterable[float]) -> float:
    """Fairness: 1 when all have the same, 1/n when one has everything."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
