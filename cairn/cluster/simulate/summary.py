"""The numbers by which policies are compared, out of a history. Pure.

wait         from submission to the first start
jct          from submission to the end
slowdown     jct over the duration, where short jobs count as ten minutes (so that seconds do not rule)
utilisation  GPU time used between the first submission and the last
stranded     GPU time idle while a job waited: fragmentation, order and reservations
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from cairn.cluster.simulate.history import JobHistory, ReplayHistory

SHORT = 600.0


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    jobs: int
    done: int
    rejected: int
    timeouts: int
    wait_mean: float
    wait_p50: float
    wait_p99: float
    jct_mean: float
    slowdown_mean: float
    slowdown_p99: float
    utilisation: float
    stranded_gpu_hours: float
    makespan_hours: float
    fairness: float  # Jain's index of the users' mean slowdowns: 1 is equal
    preempted: int
    resized: int
    lost_gpu_hours: float
    spread_gangs: float  # share of gangs over more racks than needed
    deadlines_met: float | None  # of the jobs that have one; a rejected one is not met
    seconds: float = 0.0  # it took to simulate


def summarise(history: ReplayHistory, seconds: float = 0.0) -> ReplaySummary:
    stories = list(history.stories.values())
    ran = [story for story in stories if story.first_start is not None]
    ended = [story for story in ran if story.end is not None]
    waits = sorted(story.first_start - story.job.submit for story in ran)  # type: ignore[operator]
    slow = sorted(_slowdown(story) for story in ended)
    last = max((story.end or 0.0 for story in ended), default=0.0)
    submitted = [story.job.submit for story in stories]
    used, stranded = _areas(history, min(submitted), max(submitted))
    due = [story for story in stories if story.job.deadline is not None]
    gangs = [story for story in ran if story.job.gpus > history.cluster.gpus]
    return ReplaySummary(
        policy=history.policy,
        jobs=len(stories),
        done=len(ended),
        rejected=sum(story.state == "rejected" for story in stories),
        timeouts=sum(story.state == "timeout" for story in stories),
        wait_mean=_mean(waits),
        wait_p50=percentile(waits, 0.5),
        wait_p99=percentile(waits, 0.99),
        jct_mean=_mean([story.end - story.job.submit for story in ended]),  # type: ignore[operator]
        slowdown_mean=_mean(slow),
        slowdown_p99=percentile(slow, 0.99),
        utilisation=used,
        stranded_gpu_hours=stranded,
        makespan_hours=last / 3600,
        fairness=_fairness(ended),
        preempted=sum(story.preempted for story in stories),
        resized=sum(story.resized for story in stories),
        lost_gpu_hours=sum(story.lost for story in stories) / 3600,
        spread_gangs=sum(story.spread for story in gangs) / len(gangs) if gangs else 0.0,
        deadlines_met=sum(_in_time(story) for story in due) / len(due) if due else None,
        seconds=seconds,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _slowdown(story: JobHistory) -> float:
    taken = (story.end or 0.0) - story.job.submit
    return max(1.0, taken / max(min(story.job.duration, story.job.limit), SHORT))


def _in_time(story: JobHistory) -> bool:
    return story.end is not None and story.end <= (story.job.deadline or 0.0) + 1e-6


def _areas(history: ReplayHistory, since: float, until: float) -> tuple[float, float]:
    """Share of GPU time used from the first submission to the last, and GPU hours idle while a job waited."""
    used = stranded = 0.0
    total = history.cluster.total
    for now, after in zip(history.samples, history.samples[1:], strict=False):
        seconds = min(after.at, until) - min(now.at, until)
        used += now.busy * seconds
        stranded += (total - now.busy) * seconds if now.waiting else 0.0
    return used / (total * (until - since)) if until > since else 0.0, stranded / 3600


def _fairness(ended: Sequence[JobHistory]) -> float:
    users: dict[str, list[float]] = defaultdict(list)
    for story in ended:
        users[story.job.user].append(_slowdown(story))
    means = [statistics.fmean(values) for values in users.values()]
    return sum(means) ** 2 / (len(means) * sum(mean**2 for mean in means)) if means else 1.0
