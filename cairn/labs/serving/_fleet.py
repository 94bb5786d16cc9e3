"""Several engines behind one door, on a virtual clock: the real scheduler in each, only the device is a function.

    arrivals --choose(replicas, request)--> replica 0: Scheduler, its own clock
                                            replica 1: ...

`serve.simulate` runs one engine to the end of its trace; a router has to look at all of them at the moment of an
arrival, so here each is brought up to that moment first. No clock, no device.
"""

from collections.abc import Callable, Iterable, Sequence

from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.step import Step

StepSeconds = Callable[[Step], float]


class Replica:
    def __init__(
        self,
        limits: Limits,
        step_seconds: StepSeconds,
        *,
        prefix_caching: bool = True,
        since: float = 0.0,
    ) -> None:
        self.scheduler = Scheduler(limits, prefix_caching=prefix_caching)
        self.step_seconds = step_seconds
        self.now = since  # when its device is free
        self.since = since  # it takes no request before
        self.busy = 0.0

    @property
    def load(self) -> int:
        return self.scheduler.waiting + self.scheduler.running

    def add(self, request: Request, at: float) -> None:
        if not self.scheduler.has_work:
            self.now = max(self.now, at)
        request.ledger.arrived = at
        self.scheduler.add(request)

    def advance(self, until: float) -> None:
        """Steps that begin before `until`."""
        while self.scheduler.has_work and self.now < until:
            step = self.scheduler.schedule()
            took = self.step_seconds(step)
            for request in step.admitted:
                request.ledger.scheduled = request.ledger.scheduled or self.now
            self.now += took
            self.busy += took
            for advance in self.scheduler.update(step, [0] * len(step.sampling)):
                ledger = advance.request.ledger
                ledger.first_token = ledger.first_token or self.now
                if advance.finished:
                    ledger.finished = self.now


Choose = Callable[[Sequence[Replica], Request, float], int]


def serve(
    replicas: Sequence[Replica], arrivals: Iterable[tuple[float, Request]], choose: Choose
) -> None:
    """Every request through the replica that is chosen for it when it arrives, until all have ended."""
    for at, request in arrivals:
        for replica in replicas:
            replica.advance(at)
        replicas[choose(replicas, request, at)].add(request, at)
    for replica in replicas:
        replica.advance(float("inf"))


def ttfts(requests: Iterable[Request]) -> list[float]:
    """Seconds to the first token, sorted."""
    return sorted(request.ledger.first_token - request.ledger.arrived for request in requests)


def share_of(ordered: Sequence[float], share: float) -> float:
    """A percentile of sorted values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
