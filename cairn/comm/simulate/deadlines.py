"""Several jobs on one fabric: who sends now? Fair sharing against the deadlines of the jobs.

A training job computes, and meanwhile last step's gradients travel: they are in time if they are
there before the computation ends. Fair sharing gives all the same, so all may be late together.
`by_deadline` gives each job, the most urgent first, the rate that it needs to be in time, and shares
what is left; a job that cannot be in time any more does not hurt one that can.

    policy: (flows now, links) -> rates          pure; `run_jobs` is the clock

Deadline-driven rates are D3's idea (Wilson et al., 2011), the order is that of earliest deadline first.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from cairn.comm.simulate.fair import max_min
from cairn.comm.simulate.topology import NO_LINK
from cairn.core.errors import ConfigError, did_you_mean

Policy = Literal["fair", "deadline"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    links: tuple[int, ...]  # that its collective uses
    bytes: float  # over each of them, in every step
    compute_us: float  # of a step; its bytes have so long to travel
    start_us: float = 0.0
    steps: int = 10


class Now(NamedTuple):
    """What a policy sees: rows are flows that have bytes left."""

    paths: np.ndarray
    left: np.ndarray  # bytes
    until: np.ndarray  # us to the deadline; can be negative
    gb_per_s: np.ndarray  # of the links


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    steps: int
    missed: int  # deadlines
    mean_step_us: float
    ideal_step_us: float  # alone on the fabric


Rates = Callable[[Now], np.ndarray]


def fairly(now: Now) -> np.ndarray:
    return max_min(now.paths, now.gb_per_s)


def by_deadline(now: Now) -> np.ndarray:
    """Earliest deadline first, each just what it needs; the rest is shared."""
    left = now.gb_per_s.astype(float).copy()
    given = np.zeros(len(now.left))
    alone = _alone(now)
    possible = (now.until > 0) & (now.left / 1e3 <= alone * np.maximum(now.until, 0) * (1 + 1e-9))
    for flow in np.lexsort((now.until, ~possible)):
        if not possible[flow]:
            break
        mine = now.paths[flow][now.paths[flow] != NO_LINK]
        needs = now.left[flow] / (1e3 * now.until[flow])
        given[flow] = min(needs, float(left[mine].min()))
        left[mine] -= given[flow]
    left = np.maximum(left, 0.0)
    return given + max_min(now.paths, left)


POLICIES: dict[Policy, Rates] = {"fair": fairly, "deadline": by_deadline}


def run_jobs(jobs: list[Job], gb_per_s: np.ndarray, policy: str = "fair") -> list[Fate]:
    """Steps of all jobs until all are done: compute and send overlap, the slower sets the pace."""
    _check(jobs, gb_per_s, policy)
    rates = POLICIES[policy]  # pyrefly: ignore
    width = max(len(job.links) for job in jobs)
    paths = np.array([[*job.links, *[NO_LINK] * (width - len(job.links))] for job in jobs])
    begun = np.array([job.start_us for job in jobs])
    left = np.array([float(job.bytes) for job in jobs])
    length = np.array([job.compute_us for job in jobs])
    step, missed = np.zeros(len(jobs), dtype=int), np.zeros(len(jobs), dtype=int)
    ended = np.zeros(len(jobs))
    goal, now = np.array([job.steps for job in jobs]), 0.0
    while (step < goal).any():
        sending = np.flatnonzero((step < goal) & (begun <= now + 1e-9) & (left > 0))
        rate = np.zeros(len(jobs))
        if len(sending):
            until = begun[sending] + length[sending] - now
            rate[sending] = rates(Now(paths[sending], left[sending], until, gb_per_s))
        later = _next_event(now, begun, length, left, rate, step < goal)
        left = np.where(rate > 0, np.maximum(left - rate * 1e3 * (later - now), 0.0), left)
        left[left < 1e-6] = 0.0
        now = later
        over = (step < goal) & (left <= 0) & (begun + length <= now + 1e-9)
        for job in np.flatnonzero(over):
            missed[job] += now > begun[job] + length[job] + 1e-6
            step[job] += 1
            begun[job], left[job], ended[job] = now, float(jobs[job].bytes), now
    return [
        _fate(job, int(missed[place]), (ended[place] - job.start_us) / job.steps, paths[place], gb_per_s)
        for place, job in enumerate(jobs)
    ]  # fmt: skip


def _next_event(
    now: float,
    begun: np.ndarray,
    length: np.ndarray,
    left: np.ndarray,
    rate: np.ndarray,
    going: np.ndarray,
) -> float:
    """A job begins, a computation ends, a transfer ends, or half of the time to a deadline is over."""
    times = [time for time in (*begun[going], *(begun + length)[going]) if time > now + 1e-9]
    sending = (rate > 0) & (left > 0)
    times += list(now + left[sending] / (1e3 * rate[sending]))
    if not times:
        raise ConfigError("no job can go on", hint="every link needs bandwidth")
    return max(float(min(times)), now + 1e-6)


def _alone(now: Now) -> np.ndarray:
    rate = np.append(now.gb_per_s.astype(float), np.inf)
    return rate[now.paths].min(axis=1)  # NO_LINK is the last one


def _fate(job: Job, missed: int, mean: float, path: np.ndarray, gb_per_s: np.ndarray) -> Fate:
    wire = job.bytes / (1e3 * float(gb_per_s[path[path != NO_LINK]].min()))
    return Fate(
        name=job.name,
        steps=job.steps,
        missed=missed,
        mean_step_us=float(mean),
        ideal_step_us=max(job.compute_us, wire),
    )


def _check(jobs: list[Job], gb_per_s: np.ndarray, policy: str) -> None:
    if policy not in POLICIES:
        raise ConfigError(
            f"unknown policy '{policy}'", hint=did_you_mean(policy, POLICIES, "fair or deadline")
        )
    if not jobs or (gb_per_s <= 0).any():
        raise ConfigError(f"{len(jobs)} jobs, links of {gb_per_s.min(initial=math.inf)} GB/s")
    for job in jobs:
        if job.bytes <= 0 or job.compute_us <= 0 or job.steps < 1 or not job.links:
            raise ConfigError(
                f"job '{job.name}': {job.bytes} bytes, {job.compute_us} us, {job.steps} steps",
                hint="all are positive, and it uses a link",
            )
        if not all(0 <= link < len(gb_per_s) for link in job.links):
            raise ConfigError(f"job '{job.name}' uses links {job.links} of {len(gb_per_s)}")
