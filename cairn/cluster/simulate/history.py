"""History of a replay: the life of each job, GPU allocations over time, utilisation.

Written by `replay`, read by `summary` and `page`. Data only.
"""

import msgspec

from cairn.cluster.simulate.jobs import SimulatedCluster, SimulatedJob


class Stint(msgspec.Struct, frozen=True, gc=False):
    """A stretch of time in which a job held GPUs."""

    job: int
    start: float
    end: float
    gpus: int
    pieces: tuple[tuple[int, int, int], ...]


class JobHistory(msgspec.Struct, gc=False):
    """Life of a job."""

    job: SimulatedJob
    first_start: float | None = None
    end: float | None = None
    state: str = "waits"  # runs, done, timeout, rejected
    why: str = ""
    left: float = 0.0  # seconds of work at full size
    preempted: int = 0
    resized: int = 0
    lost: float = 0.0  # GPU seconds of work done twice, and of restarts
    spread: bool = False  # ran over more racks than it needed


class UtilisationSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    at: float
    busy: int  # GPUs in use, in whole or in part
    waiting: int


class ReplayHistory(msgspec.Struct):
    policy: str
    cluster: SimulatedCluster
    stories: dict[int, JobHistory]
    samples: list[UtilisationSample]
    stints: list[Stint]
    reasons: list[tuple[float, str]]  # why the watched job waited, whenever that changed
    decisions: int = 0
