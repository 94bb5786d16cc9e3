"""Admission by deadline: a job that cannot be done in time is told so at once, and one that was admitted has a slot.

    free GPUs over time, by limits:   running jobs give back, promised ones take
    earliest slot of the new job      its whole limit with enough GPUs
    slot + limit <= deadline          admitted with a reservation; otherwise rejected, with the time it would need

Every admitted job has a reservation (conservative backfill), so a later one can never push it past its deadline.
Counts GPUs, not nodes: where nodes are broken up, a gang may still come late, and the replay reports it. Pure.
"""

from cairn.cluster.simulate.jobs import Action, Job, Reject, Reserve, Start
from cairn.cluster.simulate.view import View

Profile = list[tuple[float, int]]  # (from when, GPUs free), ascending


def decide_deadline(view: View) -> Action | None:
    if view.fresh:
        return _admit(view, view.fresh[0])
    if not view.waiting or not view.free.idle:
        return None
    steps = None
    for job in sorted(view.waiting, key=lambda job: (view.reserved[job.id], job.id)):
        if job.gpus > view.free.idle:
            continue
        at = view.reserved[job.id]
        if at > view.now:
            steps = steps or profile(view)
            if not _can_come_early(steps, job, at, view.now):
                continue
        pieces = view.fits(job)
        if pieces is not None:
            return Start(job, pieces, job.gpus)
    return None


def _can_come_early(steps: Profile, job: Job, at: float, now: float) -> bool:
    """Whether its slot could begin now: what it was promised later is free for it too."""
    for begin, free in steps:
        if begin >= now + job.limit:
            return True
        own = job.gpus if at <= begin < at + job.limit else 0
        if free + own < job.gpus:
            return False
    return True


def _admit(view: View, job: Job) -> Action:
    at = view.now
    if len(view.waiting) > 1 or view.fits(job) is None:
        at = earliest(profile(view), job, view.now)
    done = at + job.limit
    if job.deadline is not None and done > job.deadline:
        return Reject(
            job,
            f"would be done {done - job.deadline:.0f} s after its deadline: "
            f"{job.gpus} GPUs are free for {job.limit:.0f} s in {at - view.now:.0f} s at the earliest",
        )
    return Reserve(job, at)


def profile(view: View) -> Profile:
    """Free GPUs from now on, if every job takes as long as it may."""
    changes: dict[float, int] = {}
    for end, identity in view.ends:
        at = max(end, view.now)
        changes[at] = changes.get(at, 0) + view.running[identity].gpus
    for job in view.waiting:
        begin = view.reserved.get(job.id)
        if begin is None:
            continue
        begin = max(begin, view.now)
        changes[begin] = changes.get(begin, 0) - job.gpus
        changes[begin + job.limit] = changes.get(begin + job.limit, 0) + job.gpus
    free = view.free.idle + changes.pop(view.now, 0)
    steps = [(view.now, free)]
    for at in sorted(changes):
        free += changes[at]
        steps.append((at, free))
    return steps


def earliest(steps: Profile, job: Job, now: float) -> float:
    """The first time from which enough GPUs are free for the whole limit."""
    begin: float | None = None
    for at, free in steps:
        if free < job.gpus:
            if begin is not None and at >= begin + job.limit:
                break
            begin = None
        elif begin is None:
            begin = at
    return now if begin is None else max(begin, now)
