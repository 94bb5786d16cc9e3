"""Admission by deadline: a job that cannot be done in time is refused at once, and one that was admitted has a slot.

    free GPUs over time, by limits:   running jobs give back, promised ones take
    earliest slot of the new job      its whole limit with enough GPUs
    slot + limit <= deadline          admitted with a reservation; otherwise rejected, with the time it would need

Every admitted job has a reservation (conservative backfill), so a later one can never push it past its deadline.
Counts GPUs, not nodes: where nodes are broken up, a gang may still come late, and the replay reports it. Pure.
"""

from collections.abc import Iterable, Iterator

from cairn.cluster.simulate.jobs import MILLI, Action, Reject, ReserveJob, SimulatedJob, StartJob
from cairn.cluster.simulate.view import ClusterView

Level = tuple[float, int]  # from when, GPUs free
NEVER = float("inf")


def decide_deadline(view: ClusterView) -> Action | None:
    """While no job starts or ends, only newcomers and those whose time has come may start."""
    if view.fresh:
        return _admit(view, view.fresh[0])
    if not view.waiting or not view.free.idle:
        return None
    scan, now, idle, too_many = None, view.now, view.free.idle, view.free.too_many()
    for at, _, job in sorted(view.awake) if view.settled else view.promised:
        if job.gpus >= too_many and job.milli == MILLI:
            continue
        if at > now:
            scan = scan or _Scan(view.timeline.levels(idle, now))
            low = scan.below.get(job.gpus, NEVER)
            end = now + job.limit
            if (low < at and low < end) or scan.is_blocked(job.gpus, at, end):
                continue
        pieces = view.fits(job)
        if pieces is not None:
            return StartJob(job, pieces, job.gpus)
    return None


class _Scan:
    """Lazy scan of the future minimum of free GPUs."""

    def __init__(self, levels: Iterator[Level]) -> None:
        self._ahead, self._seen = levels, -NEVER
        self._lows: list[Level] = []  # from when, each new lowest level
        self.below: dict[int, float] = {}  # GPUs -> from when fewer are free, where that is known

    def is_blocked(self, gpus: int, at: float, end: float) -> bool:
        """Return whether a slot cannot last from now until `end`; GPUs reserved from `at` on count as free for it."""
        return self._falls_below(gpus, min(at, end)) or self._falls_below(0, end)

    def _falls_below(self, gpus: int, before: float) -> bool:
        end = self.below.get(gpus)
        if end is None:
            end = self._look(gpus, before)
            if end < NEVER:
                self.below[gpus] = end
        return end < before

    def _look(self, gpus: int, before: float) -> float:
        """The first time before `before` at which fewer GPUs are free; NEVER makes no statement about later times."""
        lows = self._lows
        for at, low in lows:
            if low < gpus:
                return at
        if self._seen >= before:
            return NEVER
        lowest = lows[-1][1] if lows else NEVER
        for at, free in self._ahead:
            if free < lowest:
                lowest = free
                lows.append((at, free))
                if free < gpus:
                    break
            if at >= before:
                break
        else:
            at = NEVER
        self._seen = at
        return at if lowest < gpus else NEVER


def _admit(view: ClusterView, job: SimulatedJob) -> Action:
    at, pieces = view.now, None
    if len(view.waiting) == 1:
        pieces = view.fits(job)
    if pieces is None:
        at = earliest(view.timeline.levels(view.free.idle, view.now), job, view.now)
    done = at + job.limit
    if job.deadline is not None and done > job.deadline:
        return Reject(
            job,
            f"would be done {done - job.deadline:.0f} s after its deadline: "
            f"{job.gpus} GPUs are free for {job.limit:.0f} s in {at - view.now:.0f} s at the earliest",
        )
    return ReserveJob(job, at) if pieces is None else StartJob(job, pieces, job.gpus)


def earliest(levels: Iterable[Level], job: SimulatedJob, now: float) -> float:
    """The first time from which enough GPUs are free for the whole limit."""
    begin: float | None = None
    for at, free in levels:
        if begin is not None and at >= begin + job.limit:
            break
        if free < job.gpus:
            begin = None
        elif begin is None:
            begin = at
    return now if begin is None else max(begin, now)
