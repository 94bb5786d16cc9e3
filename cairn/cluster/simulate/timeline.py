"""How many GPUs are free from now on, if every job takes as long as it may: kept up to date, never built anew.

    running jobs give back at their limits        +4 at 10:00   +8 at 11:30
    promised slots take, and give back            -8 at 11:30   +8 at 13:00
    levels(idle, now)                             now: 2   10:00: 6   11:30: 6   13:00: 14

A promise whose time has passed (its nodes were broken up) begins now, whenever now is. Knows no policy.
"""

from bisect import bisect_left
from collections.abc import Iterator
from heapq import merge

from cairn.cluster.simulate.jobs import Job


class Timeline:
    def __init__(self) -> None:
        self._times: list[float] = []
        self._changes: list[int] = []  # GPUs more (or fewer) from that time on
        self._slots: list[tuple[float, int, Job]] = []  # promised, and not yet due: when, id
        self._late: dict[int, Job] = {}

    def change(self, at: float, gpus: int) -> None:
        place = bisect_left(self._times, at)
        if place < len(self._times) and self._times[place] == at:
            self._changes[place] += gpus
            if not self._changes[place]:
                del self._times[place], self._changes[place]
        else:
            self._times.insert(place, at)
            self._changes.insert(place, gpus)

    def promise(self, job: Job, at: float) -> None:
        slot = (at, job.id, job)
        self._slots.insert(bisect_left(self._slots, slot[:2], key=_when), slot)
        self.change(at, -job.gpus)
        self.change(at + job.limit, job.gpus)

    def drop(self, job: Job, at: float) -> None:
        """The job has started, or is gone."""
        if self._late.pop(job.id, None) is not None:
            return
        del self._slots[bisect_left(self._slots, (at, job.id), key=_when)]
        self._take_back(job, at)

    def ahead(self, now: float) -> Iterator[tuple[float, int]]:
        """(when, GPUs more or fewer), from now on, ascending; a time may come twice. Not to be kept."""
        self._pass(now)
        changes: Iterator[tuple[float, int]] = zip(self._times, self._changes, strict=True)
        if not self._late:
            return changes
        late = sorted((now + job.limit, job.gpus) for job in self._late.values())
        begun = [(now, -sum(gpus for _, gpus in late))]
        return merge(changes, begun, late)

    def levels(self, idle: int, now: float) -> Iterator[tuple[float, int]]:
        """(from when, GPUs free), ascending; the first is now."""
        at, free = now, idle
        for when, gpus in self.ahead(now):
            if when != at:
                yield at, free
                at = when
            free += gpus
        yield at, free

    def _pass(self, now: float) -> None:
        """What lies behind is forgotten; promises that were due and not kept begin now."""
        while self._slots and self._slots[0][0] < now:
            at, identity, job = self._slots.pop(0)
            self._take_back(job, at)
            self._late[identity] = job
        behind = bisect_left(self._times, now)  # nobody runs beyond its limit: they cancel out
        del self._times[:behind], self._changes[:behind]

    def _take_back(self, job: Job, at: float) -> None:
        self.change(at, job.gpus)
        self.change(at + job.limit, -job.gpus)


def _when(slot: tuple[float, int, Job]) -> tuple[float, int]:
    return slot[:2]
