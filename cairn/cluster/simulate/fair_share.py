"""Usage of each user: current dominant share (DRF), and past usage with a half-life.

    dominant(user)   max over GPU, CPU, memory of the share of the cluster that the user holds now
    usage(user)      GPU seconds; what is one half-life old counts half

Knows users and amounts, not who should be next.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping

from cairn.cluster.simulate.jobs import MILLI, SimulatedCluster, SimulatedJob

LOG_2 = math.log(2)
ROUNDED = 1 + 1e-9  # sums of tenths that came and went are not what they were


class Shares:
    def __init__(self, cluster: SimulatedCluster, half_life: float, track: bool = True) -> None:
        """Track the usage of users only if `track` is set, and the cluster's limits always."""
        self._capacity = (float(cluster.total), cluster.cpus, cluster.memory_gib)
        self.limited = bool(cluster.cpus or cluster.memory_gib)  # by more than GPUs
        self._held: dict[str, list[float]] = {}
        self._dominant = defaultdict[str, float](float)
        self._together = [0.0, 0.0, 0.0]
        self._usage: dict[str, tuple[float, float, float]] = {}  # value, GPUs held since, when
        self._half_life = half_life
        self._now, self._known = float("-inf"), dict[str, float]()
        self.counts = track or self.limited  # whether anybody may ask

    def lacks(self, job: SimulatedJob) -> str | None:
        """Describe the resource besides GPUs that the cluster lacks for the job now, or None."""
        _, cpus, memory = self._capacity
        if cpus and self._together[1] + job.cpus > cpus * ROUNDED:
            return f"{job.cpus:g} CPUs, {cpus - self._together[1]:g} of {cpus:g} are free"
        if memory and self._together[2] + job.memory_gib > memory * ROUNDED:
            return f"{job.memory_gib:g} GiB, {memory - self._together[2]:g} of {memory:g} are free"
        return None

    def change(self, job: SimulatedJob, gpus: int, sign: int, now: float) -> None:
        """The job got (+1) or gave back (-1) these GPUs."""
        user, gpus_held = job.user, sign * gpus * job.milli / MILLI
        amounts = self._held.get(user)
        if amounts is None:
            amounts = self._held[user] = [0.0, 0.0, 0.0]
        amounts[0] += gpus_held
        value, rate, since = self._usage.get(user, (0.0, 0.0, now))
        value = _decayed(value, rate, now - since, self._half_life)
        self._usage[user] = (value, amounts[0], now)
        self._together[0] += gpus_held
        if not self.limited:
            self._dominant[user] = amounts[0] / self._capacity[0]
            return
        for place, amount in ((1, job.cpus), (2, job.memory_gib)):
            amounts[place] += sign * amount
            self._together[place] += sign * amount
        self._dominant[user] = max(h / c for h, c in zip(amounts, self._capacity, strict=True) if c)

    def dominant(self, user: str) -> float:
        return self._dominant[user]

    def usage(self, user: str, now: float) -> float:
        return self._usages((user,), now)[user]

    def by_usage(self, users: Collection[str], now: float) -> list[str]:
        """The user who has used least first; equal ones by name."""
        if len(users) == 1:
            return list(users)
        return sorted(sorted(users), key=self._usages(users, now).__getitem__)

    def by_dominant(self, users: Collection[str], now: float) -> list[str]:
        """The user with the smallest dominant share first; of equal ones the one who has used less."""
        dominant = self._dominant
        if len({dominant[user] for user in users}) == len(users):
            return sorted(users, key=dominant.__getitem__)
        return sorted(self.by_usage(users, now), key=dominant.__getitem__)

    def _usages(self, users: Collection[str], now: float) -> Mapping[str, float]:
        """Usage of at least these users, cached for one instant, in which starting and ending jobs use nothing."""
        if now != self._now:
            self._now, self._known = now, {}
        cached = self._known
        for user in users:
            if user not in cached:
                value, rate, since = self._usage.get(user, (0.0, 0.0, now))
                cached[user] = _decayed(value, rate, now - since, self._half_life)
        return cached


def _decayed(value: float, rate: float, seconds: float, half_life: float) -> float:
    """A value after some time of decay, while `rate` a second was added. Exact, not by steps."""
    fade = 0.5 ** (seconds / half_life)
    return value * fade + rate * half_life / LOG_2 * (1 - fade)
