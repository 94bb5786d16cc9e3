"""Input of a policy: the cluster, waiting and running jobs at one instant. Read-only.

A policy is a function `decide(view) -> Action | None`; the replay applies the action and asks again until there is
nothing more to do at this time. Durations are hidden: a policy sees limits.
"""

from collections.abc import Iterable

from cairn.cluster.simulate.fair_share import Shares
from cairn.cluster.simulate.free_gpus import Free, Rule, tightest
from cairn.cluster.simulate.jobs import (
    MILLI,
    Pieces,
    Running,
    SimulatedCluster,
    SimulatedJob,
    StartJob,
)
from cairn.cluster.simulate.offers import Offers
from cairn.cluster.simulate.reservation import Reservation, reserve
from cairn.cluster.simulate.timeline import GpuTimeline
from cairn.cluster.simulate.waiting_queue import UserQueue


class ClusterView:
    """`waiting` is in the policy's own order; `ends` are (limit, id) of the running ones, soonest first."""

    def __init__(
        self, cluster: SimulatedCluster, line: UserQueue, half_life: float, track: bool = True
    ) -> None:
        self.cluster = cluster
        self.total = cluster.total
        self.now = 0.0
        self.free = Free(cluster)
        self.waiting = line.jobs
        self.queues = line.users  # the same by user, where users decide
        self.sizes = line.sizes  # GPUs -> how many of them wait; 0: those that share one
        self.running: dict[int, Running] = {}
        self.offers = Offers()  # of those of them that are elastic, where that decides
        self.ends: list[tuple[float, int]] = []
        self.reserved: dict[int, float] = {}  # id of a waiting job -> when it was promised
        self.promised: list[tuple[float, int, SimulatedJob]] = []  # the same in order: when, id
        # newly promised, or due, since the policy last had nothing to do
        self.awake: list[tuple[float, int, SimulatedJob]] = []
        self.timeline = GpuTimeline()
        self.fresh: list[SimulatedJob] = []  # came since the policy last had nothing to do
        # Since then no job ended, and only newcomers started, beside a promise.
        self.settled = False
        self.beside = False  # a job started beside a promise since then
        self.looked = 0  # while not settled: how many behind the first may not start
        self.shares = Shares(cluster, half_life, track)
        self.rule: Rule = tightest
        self.packed = False
        self.ended = 0  # jobs that gave GPUs back; a promise is good until the next one does
        self._memo: tuple[int, int, Reservation] | None = None

    def fits(self, job: SimulatedJob, gpus: int | None = None, avoid: int = 0) -> Pieces | None:
        """Placement for starting the job now, or None; `gpus` overrides the size of an elastic job."""
        count = job.gpus if gpus is None else gpus
        if job.milli == MILLI and count >= self.free.too_many():
            return None
        if self.shares.limited and self.shares.lacks(job) is not None:
            return None
        return self.free.find(count, job.milli, self.rule, avoid=avoid, packed=self.packed)

    def reservation(self, job: SimulatedJob) -> Reservation:
        """When a job that does not fit now will fit at the latest; remembered until a job gives GPUs back.

        A job that starts beside the promise ends before or keeps off the nodes, so it stays true; a job that starts
        otherwise makes it void.
        """
        promise = self.known_promise(job)
        if promise is not None:
            return promise
        reserved = reserve(self.free, self.ends, self.running, job, self.now)
        self._memo = (job.id, self.ended, reserved)
        return reserved

    def known_promise(self, job: SimulatedJob) -> Reservation | None:
        """The cached reservation of a job, if it is still valid."""
        memo = self._memo
        if memo is not None and memo[0] == job.id and memo[1] == self.ended:
            return memo[2]
        return None

    def held_back_for(self) -> int | None:
        """The job whose reservation kept others from starting; None if no other job fitted."""
        memo = self._memo
        return memo[0] if memo is not None and memo[1] == self.ended else None

    def started(self, action: StartJob, place: int) -> None:
        """A job that starts beside the promise changes nothing for others; else all has to be worked out again."""
        self.beside = action.beside
        if not action.beside:
            self.settled, self.looked, self._memo = False, 0, None
        elif not action.newcomer:
            self.settled, self.looked = False, place - 1

    def ended_one(self) -> None:
        self.ended += 1
        self.settled, self.looked = False, 0

    def settle(self) -> None:
        """The policy has nothing more to do."""
        self.settled, self.beside, self.looked = True, False, 0
        if self.fresh:
            self.fresh = []
        if self.awake:
            self.awake = []

    def try_without(self, run: Running) -> None:
        """Remove a running job tentatively; `undo` must restore it."""
        self.free.give(run.pieces)
        if self.shares.counts:
            self.shares.change(run.job, run.gpus, -1, self.now)

    def undo(self, run: Running) -> None:
        self.free.take(run.pieces)
        if self.shares.counts:
            self.shares.change(run.job, run.gpus, +1, self.now)

    def somebody_may_fit(self) -> bool:
        """Quick test whether any waiting job is small enough for the free GPUs; False is always right."""
        free, sizes = self.free, self.sizes
        if 0 in sizes:
            return free.idle > 0 or free.sharing > 0
        return bool(sizes) and free.idle > 0 and min(sizes) < free.too_many()

    def may_fit(self, job: SimulatedJob) -> bool:
        """The same quick test for one job."""
        return job.milli < MILLI or job.gpus < self.free.too_many()

    def users(self) -> Iterable[str]:
        """Users with waiting jobs."""
        return self.queues.keys()
