"""Admission by deadline: a job that cannot be done in time is told so at once, and one that was admitted has a slot.

    free GPUs over time, by limits:   running jobs give back, promised ones take
    earliest slot of the new job      its whole limit with enough GPUs
    slot + limit <= deadline          admitted with a reservation; otherwise rejected, with the time it would need

Every admitted job has a reservation (conservative backfill), so a later one can never push it past its deadline.
Counts GPUs, not nodes: where nodes are broken up, a gang may still come late, and the replay reports it. Pure.
"""

from collections.abc import Iterable, Iterator

from cairn.cluster.simulate.jobs import MILLI, Action, Job, Reject, Reserve, Start
from cairn.cluster.simulate.view import View

Level = tuple[float, int]  # from when, GPUs free
NEVER = float("inf")
END = (NEVER, 0)


def decide_deadline(view: View) -> Action | None:
    """While nobody starts or ends, only newcomers and those whose time has come may start."""
    if view.fresh:
        return _admit(view, view.fresh[0])
    if not view.waiting or not view.free.idle:
        return None
    scan, now, idle, too_many = None, view.now, view.free.idle, view.free.too_many()
    for at, _, job in sorted(view.awake) if view.settled else view.promised:
        if job.gpus >= too_many and job.milli == MILLI:
            continue
        if at > now:
            scan = scan or _Scan(view.timeline.ahead(now), idle, now)
            if scan.is_blocked(job.gpus, at, now + job.limit):
                continue
        pieces = view.fits(job)
        if pieces is not None:
            return Start(job, pieces, job.gpus)
    return None


class _Scan:
    """How low the free GPUs fall from now on, looked at only as far as somebody asks."""

    def __init__(self, changes: Iterator[Level], idle: int, now: float) -> None:
        self._ahead, self._free, self._at = changes, idle, now
        self._lows: list[Level] = []  # from when, each new lowest level
        self._below: dict[int, float] = {}  # GPUs -> from when fewer are free, where that is known

    def is_blocked(self, gpus: int, at: float, end: float) -> bool:
        """Whether a slot cannot begin now and last until `end`: what was promised from `at` on is free for it too."""
        known = self._below.get(gpus)
        if known is not None and known < at and known < end:
            return True
        return self._falls_below(gpus, min(at, end)) or self._falls_below(0, end)

    def _falls_below(self, gpus: int, before: float) -> bool:
        known = self._below.get(gpus)
        if known is None:
            known = self._look(gpus, before)
            if known < NEVER:
                self._below[gpus] = known
        return known < before

    def _look(self, gpus: int, before: float) -> float:
        """From when fewer are free, if that is before; NEVER says nothing about later."""
        for at, low in self._lows:
            if low < gpus:
                return at
        at, free, lows = self._at, self._free, self._lows
        lowest, found = lows[-1][1] if lows else free + 1, NEVER
        while at < before and found == NEVER:
            when, change = next(self._ahead, END)
            if when != at:  # the level from `at` on is known
                if free < lowest:
                    lowest = free
                    lows.append((at, free))
                    found = at if free < gpus else NEVER
                at = when
            free += change
        self._at, self._free = at, free
        return found


def _admit(view: View, job: Job) -> Action:
    at = view.now
    if len(view.waiting) > 1 or view.fits(job) is None:
        at = earliest(view.timeline.levels(view.free.idle, view.now), job, view.now)
    done = at + job.limit
    if job.deadline is not None and done > job.deadline:
        return Reject(
            job,
            f"would be done {done - job.deadline:.0f} s after its deadline: "
            f"{job.gpus} GPUs are free for {job.limit:.0f} s in {at - view.now:.0f} s at the earliest",
        )
    return Reserve(job, at)


def earliest(levels: Iterable[Level], job: Job, now: float) -> float:
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
