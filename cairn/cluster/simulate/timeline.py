"""Timeline of free GPUs if every job runs to its time limit, maintained incrementally.

    running jobs give back at their limits        +4 at 10:00   +8 at 11:30
    promised slots take, and give back            -8 at 11:30   +8 at 13:00
    levels(idle, now)                             now: 2   10:00: 6   11:30: 6   13:00: 14

A promise whose time has passed (its nodes were broken up) begins now, whenever now is. Knows no policy.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import accumulate, chain

from cairn.cluster.simulate.jobs import SimulatedJob


class GpuTimeline:
    def __init__(self) -> None:
        self._times: list[float] = []
        self._changes: list[int] = []  # GPUs more (or fewer) from that time on
        self._slots: list[
            tuple[float, int, SimulatedJob]
        ] = []  # promised, and not yet due: when, id
        self._late: dict[int, SimulatedJob] = {}

    def change(self, at: float, gpus: int) -> None:
        _add(self._times, self._changes, at, gpus)

    def promise(self, job: SimulatedJob, at: float) -> None:
        slot = (at, job.id, job)
        insort(self._slots, slot)
        self.change(at, -job.gpus)
        self.change(at + job.limit, job.gpus)

    def drop(self, job: SimulatedJob, at: float) -> None:
        """The job has started, or is gone."""
        if self._late.pop(job.id, None) is not None:
            return
        del self._slots[bisect_left(self._slots, (at, job.id))]
        self._take_back(job, at)

    def levels(self, idle: int, now: float) -> Iterator[tuple[float, int]]:
        """(from when, GPUs free), ascending, each time once; the first is now. Not to be kept."""
        self._pass(now)
        times, changes = self._with_late(now) if self._late else (self._times, self._changes)
        free = accumulate(changes, initial=idle)
        if times and times[0] == now:
            next(free)
            return zip(times, free, strict=True)
        return zip(chain((now,), times), free, strict=True)

    def _with_late(self, now: float) -> tuple[list[float], list[int]]:
        times, changes = self._times.copy(), self._changes.copy()
        for job in self._late.values():
            _add(times, changes, now, -job.gpus)
            _add(times, changes, now + job.limit, job.gpus)
        return times, changes

    def _pass(self, now: float) -> None:
        """Drop the past; reservations that are overdue start now."""
        while self._slots and self._slots[0][0] < now:
            at, identity, job = self._slots.pop(0)
            self._take_back(job, at)
            self._late[identity] = job
        behind = bisect_left(self._times, now)  # no job runs beyond its limit: they cancel out
        del self._times[:behind], self._changes[:behind]

    def _take_back(self, job: SimulatedJob, at: float) -> None:
        self.change(at, job.gpus)
        self.change(at + job.limit, -job.gpus)


def _add(times: list[float], changes: list[int], at: float, gpus: int) -> None:
    place = bisect_left(times, at)
    if place < len(times) and times[place] == at:
        changes[place] += gpus
        if not changes[place]:
            del times[place], changes[place]
    else:
        times.insert(place, at)
        changes.insert(place, gpus)
