"""Who has used how much: now, by the resource a user has most of (DRF), and over time, with a half-life.

    dominant(user)   max over GPU, CPU, memory of the share of the cluster that the user holds now
    usage(user)      GPU seconds; what is one half-life old counts half

Knows users and amounts, not who should be next.
"""

import math

from cairn.cluster.simulate.jobs import MILLI, Cluster, Job


class Shares:
    def __init__(self, cluster: Cluster, half_life: float, track: bool = True) -> None:
        """Without `track` nobody asks about users, and only what limits the cluster is counted."""
        self._capacity = (float(cluster.total), cluster.cpus, cluster.memory_gib)
        self.limited = bool(cluster.cpus or cluster.memory_gib)  # by more than GPUs
        self._held: dict[str, list[float]] = {}
        self._dominant: dict[str, float] = {}
        self._together = [0.0, 0.0, 0.0]
        self._usage: dict[str, tuple[float, float]] = {}  # user -> value, as of when
        self._half_life = half_life
        self._now, self._known = float("-inf"), dict[str, float]()
        self._track = track

    def lacks(self, job: Job) -> str | None:
        """Which resource of the whole cluster, besides GPUs, is too short for the job now."""
        _, cpus, memory = self._capacity
        if cpus and self._together[1] + job.cpus > cpus:
            return f"{job.cpus:g} CPUs, {cpus - self._together[1]:g} of {cpus:g} are free"
        if memory and self._together[2] + job.memory_gib > memory:
            return f"{job.memory_gib:g} GiB, {memory - self._together[2]:g} of {memory:g} are free"
        return None

    def change(self, job: Job, gpus: int, sign: int, now: float) -> None:
        """The job got (+1) or gave back (-1) these GPUs."""
        if not self._track and not job.cpus and not job.memory_gib:
            return
        user, gpus_held = job.user, sign * gpus * job.milli / MILLI
        self._usage[user] = (self.usage(user, now), now)
        held = self._held.get(user)
        if held is None:
            held = self._held[user] = [0.0, 0.0, 0.0]
        held[0] += gpus_held
        self._together[0] += gpus_held
        if not self.limited:
            self._dominant[user] = held[0] / self._capacity[0]
            return
        for place, amount in ((1, job.cpus), (2, job.memory_gib)):
            held[place] += sign * amount
            self._together[place] += sign * amount
        self._dominant[user] = max(h / c for h, c in zip(held, self._capacity, strict=True) if c)

    def dominant(self, user: str) -> float:
        return self._dominant.get(user, 0.0)

    def usage(self, user: str, now: float) -> float:
        if now != self._now:  # of one moment: whoever starts or ends has used nothing in it
            self._now, self._known = now, {}
        known = self._known.get(user)
        if known is None:
            value, since = self._usage.get(user, (0.0, now))
            known = _decayed(value, self._gpus(user), now - since, self._half_life)
            self._known[user] = known
        return known

    def _gpus(self, user: str) -> float:
        held = self._held.get(user)
        return held[0] if held else 0.0


def _decayed(value: float, rate: float, seconds: float, half_life: float) -> float:
    """A value after some time of decay, while `rate` a second was added. Exact, not by steps."""
    fade = 0.5 ** (seconds / half_life)
    return value * fade + rate * half_life / math.log(2) * (1 - fade)
