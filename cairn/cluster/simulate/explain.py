"""Why does this job wait, and what became of it? One line, with the numbers that decide it.

Pure: reads the view or the history, changes nothing.
"""

from cairn.cluster.simulate.history import ReplayHistory
from cairn.cluster.simulate.jobs import MILLI, SimulatedJob
from cairn.cluster.simulate.view import ClusterView
from cairn.core.units import format_duration


def explain(view: ClusterView, job: SimulatedJob, policy: str) -> str:
    """The first reason that holds, from those that no waiting can change to the order of the queue."""
    lacks = view.shares.lacks(job)
    if lacks is not None:
        return f"needs {lacks}"
    short = _too_few(view, job)
    if short is not None:
        return f"{short}; {_ahead(view, job)}"
    head = view.waiting[0]
    if job.id in view.reserved and policy == "deadline":
        return f"admitted for {_when(view, view.reserved[job.id])}; before that it would delay another admitted job"
    if head.id != job.id and policy in ("fifo", "sjf", "priority"):
        return f"fits, but {policy} lets nobody pass: {_ahead(view, job)}; job {head.id} needs {_gpus(head)}"
    if policy in ("fair", "drf"):
        return f"fits, but {_fairness(view, job, policy)}"
    if head.id != job.id and view.fits(head) is None:
        promise = view.reservation(head)
        return (
            f"fits, but would delay job {head.id}, which has {_gpus(head)} promised {_when(view, promise.at)}; "
            f"this job may take {format_duration(job.limit)}"
        )
    return f"its turn comes: {_ahead(view, job)}"


def fate(history: ReplayHistory, identity: int) -> str:
    """Describe the outcome of a job."""
    story = history.stories[identity]
    if story.first_start is None:
        return f"job {identity} is {story.state}: {story.why}"
    wait = story.first_start - story.job.submit
    begun = f"waits {format_duration(wait)}" if wait else "starts as it comes"
    taken = 0.0 if story.end is None else story.end - story.job.submit
    moved = f", preempted {story.preempted} and resized {story.resized} times"
    moved = moved if story.preempted or story.resized else ""
    return f"job {identity} {begun}{moved}, {story.state} {format_duration(taken)} after it came"


def refusals(history: ReplayHistory) -> list[tuple[int, str]]:
    """Rejected jobs with their reasons."""
    return [
        (story.job.id, story.why) for story in history.stories.values() if story.state == "rejected"
    ]


def _too_few(view: ClusterView, job: SimulatedJob) -> str | None:
    if view.fits(job) is not None:
        return None
    free, gpus = view.free, view.cluster.gpus
    if job.milli < MILLI:
        most = max((state[-1] for state in free.groups if len(state) > 1), default=0)
        return (
            f"needs {job.milli}/1000 of a GPU, none is idle and at most {most}/1000 of one is left"
        )
    if job.gpus > free.idle:
        return f"needs {_gpus(job)}, {free.idle} of {view.cluster.total} are idle"
    if job.gpus <= gpus:
        return (
            f"needs {_gpus(job)} on one node, {free.idle} are idle but at most {free.largest()} "
            "on one (fragmentation)"
        )
    whole = job.gpus // gpus
    return (
        f"needs {whole} whole nodes, {free.idle} GPUs are idle but only {free.idle_nodes()} nodes are "
        "(fragmentation)"
    )


def _gpus(job: SimulatedJob) -> str:
    return f"{job.gpus} GPU{'s' if job.gpus > 1 else ''}"


def _ahead(view: ClusterView, job: SimulatedJob) -> str:
    ahead = next((place for place, other in enumerate(view.waiting) if other.id == job.id), 0)
    if ahead == 0:
        return (
            "it is the next"
            if view.fits(job) is not None
            else f"it is the next, {_soonest(view, job)}"
        )
    return f"{ahead} job{'s' if ahead > 1 else ''} ahead of it"


def _soonest(view: ClusterView, job: SimulatedJob) -> str:
    return (
        f"{_when(view, view.reservation(job).at)} at the latest"
        if view.ends
        else "as soon as it fits"
    )


def _fairness(view: ClusterView, job: SimulatedJob, policy: str) -> str:
    if policy == "drf":
        least = min(view.users(), key=lambda user: (view.shares.dominant(user), user))
        return (
            f"{job.user} holds {view.shares.dominant(job.user):.1%} of the cluster, "
            f"{least} {view.shares.dominant(least):.1%}"
        )
    least = min(view.users(), key=lambda user: (view.shares.usage(user, view.now), user))
    mine, theirs = view.shares.usage(job.user, view.now), view.shares.usage(least, view.now)
    return f"{job.user} used {mine / 3600:.1f} GPU-hours lately, {least} {theirs / 3600:.1f}"


def _when(view: ClusterView, at: float) -> str:
    return f"in {format_duration(max(0.0, at - view.now))}"
