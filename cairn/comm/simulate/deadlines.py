"""Several training jobs share one fabric: fair sharing against earliest deadline first.

A training job computes a step while the gradients of the last step are sent; the deadline of the transfer is the
end of the computation. Fair sharing gives all flows the same rate, so all may miss their deadlines together.
`by_deadline` serves the most urgent job first, with the rate that it needs, and shares the remaining bandwidth;
a job that must miss its deadline takes no bandwidth from one that can meet it.

    policy: (flows now, links) -> rates          pure; `run_jobs` is the clock

Deadline-driven rates are D3's idea (Wilson et al., 2011), the order is that of earliest deadline first.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from cairn.comm.simulate.max_min_fairness import max_min
from cairn.comm.simulate.topology import NO_LINK
from cairn.core.errors import ConfigError, did_you_mean

Policy = Literal["fair", "deadline"]


class TransferJob(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    links: tuple[int, ...]  # that its collective uses
    bytes: float  # over each of them, in every step
    compute_us: float  # of a step; its bytes have so long to travel
    start_us: float = 0.0
    steps: int = 10


class Now(NamedTuple):
    """Input of a policy: one row for each flow with bytes left."""

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
    free_gb_per_s = now.gb_per_s.astype(float).copy()
    granted = np.zeros(len(now.left))
    alone = _alone(now)
    possible = (now.until > 0) & (now.left / 1e3 <= alone * np.maximum(now.until, 0) * (1 + 1e-9))
    for flow in np.lexsort((now.until, ~possible)):
        if not possible[flow]:
            break
        mine = now.paths[flow][now.paths[flow] != NO_LINK]
        needs = now.left[flow] / (1e3 * now.until[flow])
        granted[flow] = min(needs, float(free_gb_per_s[mine].min()))
        free_gb_per_s[mine] -= granted[flow]
    free_gb_per_s = np.maximum(free_gb_per_s, 0.0)
    return granted + max_min(now.paths, free_gb_per_s)


POLICIES: dict[Policy, Rates] = {"fair": fairly, "deadline": by_deadline}


def run_jobs(jobs: list[TransferJob], gb_per_s: np.ndarray, policy: str = "fair") -> list[Fate]:
    """Steps of all jobs until all are done: compute and send overlap, the slower sets the pace."""
    _check(jobs, gb_per_s, policy)
    rates = POLICIES[policy]  # pyrefly: ignore
    width = max(len(job.links) for job in jobs)
    paths = np.array([[*job.links, *[NO_LINK] * (width - len(job.links))] for job in jobs])
    step_began_us = np.array([job.start_us for job in jobs])
    bytes_left = np.array([float(job.bytes) for job in jobs])
    compute_us = np.array([job.compute_us for job in jobs])
    step, missed_deadlines = np.zeros(len(jobs), dtype=int), np.zeros(len(jobs), dtype=int)
    ended = np.zeros(len(jobs))
    goal, now_us = np.array([job.steps for job in jobs]), 0.0
    while (step < goal).any():
        sending = np.flatnonzero(
            (step < goal) & (step_began_us <= now_us + 1e-9) & (bytes_left > 0)
        )
        rate = np.zeros(len(jobs))
        if len(sending):
            until = step_began_us[sending] + compute_us[sending] - now_us
            rate[sending] = rates(Now(paths[sending], bytes_left[sending], until, gb_per_s))
        later = _next_event(now_us, step_began_us, compute_us, bytes_left, rate, step < goal)
        bytes_left = np.where(
            rate > 0, np.maximum(bytes_left - rate * 1e3 * (later - now_us), 0.0), bytes_left
        )
        bytes_left[bytes_left < 1e-6] = 0.0
        now_us = later
        over = (step < goal) & (bytes_left <= 0) & (step_began_us + compute_us <= now_us + 1e-9)
        for job in np.flatnonzero(over):
            missed_deadlines[job] += now_us > step_began_us[job] + compute_us[job] + 1e-6
            step[job] += 1
            step_began_us[job], bytes_left[job], ended[job] = now_us, float(jobs[job].bytes), now_us
    return [
        _fate(
            job,
            int(missed_deadlines[place]),
            (ended[place] - job.start_us) / job.steps,
            paths[place],
            gb_per_s,
        )
        for place, job in enumerate(jobs)
    ]


def _next_event(
    now: float,
    step_began_us: np.ndarray,
    compute_us: np.ndarray,
    bytes_left: np.ndarray,
    rate: np.ndarray,
    going: np.ndarray,
) -> float:
    """A job begins, a computation ends, a transfer ends, or half of the time to a deadline is over."""
    times = [
        time
        for time in (*step_began_us[going], *(step_began_us + compute_us)[going])
        if time > now + 1e-9
    ]
    sending = (rate > 0) & (bytes_left > 0)
    times += list(now + bytes_left[sending] / (1e3 * rate[sending]))
    if not times:
        raise ConfigError("no job can go on", hint="every link needs bandwidth")
    return max(float(min(times)), now + 1e-6)


def _alone(now: Now) -> np.ndarray:
    rate = np.append(now.gb_per_s.astype(float), np.inf)
    return rate[now.paths].min(axis=1)  # NO_LINK is the last one


def _fate(
    job: TransferJob, missed: int, mean: float, path: np.ndarray, gb_per_s: np.ndarray
) -> Fate:
    wire = job.bytes / (1e3 * float(gb_per_s[path[path != NO_LINK]].min()))
    return Fate(
        name=job.name,
        steps=job.steps,
        missed=missed,
        mean_step_us=float(mean),
        ideal_step_us=max(job.compute_us, wire),
    )


def _check(jobs: list[TransferJob], gb_per_s: np.ndarray, policy: str) -> None:
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
