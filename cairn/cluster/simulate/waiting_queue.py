"""Waiting jobs in order: one queue, or one for each user, with counts by requested size.

    jobs            [first, second, ...]        by the policy's key, which never changes while a job waits
    users["ann"]    [first of ann, ...]         the same order
    sizes           {1: 12, 8: 3, 0: 4}         GPUs -> jobs; 0 are those that share one

Keys are kept beside the jobs, so that a place is found without asking for them again. Knows no GPUs and no time.
"""

from bisect import bisect_left
from collections.abc import Callable

from cairn.cluster.simulate.jobs import MILLI, SimulatedJob

Key = Callable[[SimulatedJob], tuple[float, ...]]


class Queue:
    def __init__(self) -> None:
        self.jobs: list[SimulatedJob] = []
        self._keys: list[tuple[float, ...]] = []

    def add(self, job: SimulatedJob, key: tuple[float, ...]) -> None:
        keys = self._keys
        if not keys or keys[-1] < key:  # most come last
            keys.append(key)
            self.jobs.append(job)
        else:
            place = bisect_left(keys, key)
            keys.insert(place, key)
            self.jobs.insert(place, job)

    def remove(self, job: SimulatedJob, key: tuple[float, ...]) -> int:
        """The place that it had."""
        keys = self._keys
        place = bisect_left(keys, key)
        if place == len(keys) or self.jobs[place].id != job.id:
            raise RuntimeError(f"job {job.id} does not wait")
        del keys[place], self.jobs[place]
        return place


class UserQueue:
    def __init__(self, key: Key, by_user: bool) -> None:
        self._key, self._by_user = key, by_user
        self._all = Queue()
        self._own: dict[str, Queue] = {}
        self.jobs: list[SimulatedJob] = self._all.jobs
        self.users: dict[str, list[SimulatedJob]] = {}
        self.sizes: dict[int, int] = {}

    def join(self, job: SimulatedJob) -> None:
        key, size = self._key(job), job.gpus if job.milli == MILLI else 0
        self._all.add(job, key)
        self.sizes[size] = self.sizes.get(size, 0) + 1
        if self._by_user:
            own = self._own.get(job.user)
            if own is None:
                own = self._own[job.user] = Queue()
            own.add(job, key)
            self.users[job.user] = own.jobs

    def leave(self, job: SimulatedJob) -> int:
        """The place that it had among all."""
        key, size = self._key(job), job.gpus if job.milli == MILLI else 0
        place = self._all.remove(job, key)
        if self.sizes[size] > 1:
            self.sizes[size] -= 1
        else:
            del self.sizes[size]
        if self._by_user:
            own = self._own[job.user]
            own.remove(job, key)
            if not own.jobs:
                del self.users[job.user]
        return place
