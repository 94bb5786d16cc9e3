"""Types of the simulation: a cluster of equal nodes, jobs with their requests, and the decisions of a policy.

    Start      a waiting job gets these GPUs now
    Preempt    whole running jobs give theirs back and wait again; never a part of a gang
    Resize     a running elastic job goes on with other GPUs
    Reserve    a waiting job is promised a time
    Reject     a job will never run, and why

Times are seconds since the trace began. Data only, without cycles, so the garbage collector need not look at it.
"""

import msgspec

from cairn.core.errors import ConfigError

MILLI = 1000  # of a GPU

Piece = tuple[int, int, int]  # node, bits of its GPUs, thousandths of each
Pieces = tuple[Piece, ...]


class SimulatedCluster(msgspec.Struct, frozen=True, kw_only=True):
    nodes: int
    gpus: int = 8  # of each node
    rack: int = 16  # nodes that share a switch
    cpus: float = 0.0  # of the whole cluster; 0 is not counted
    memory_gib: float = 0.0

    @property
    def total(self) -> int:
        return self.nodes * self.gpus

    def words(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes:,} nodes"
        return f"{nodes} x {self.gpus} GPUs, {self.rack} nodes a rack"


class SimulatedJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    id: int
    submit: float
    duration: float  # with `gpus` GPUs, undisturbed
    gpus: int
    limit: float  # it is ended then, so it is what a policy may rely on
    milli: int = MILLI  # below 1000 it shares one GPU
    user: str = "all"
    priority: int = 0  # the larger goes first
    least: int = 0  # an elastic job runs with least..gpus; 0 is not elastic
    deadline: float | None = None
    cpus: float = 0.0
    memory_gib: float = 0.0

    @property
    def elastic(self) -> bool:
        return 0 < self.least < self.gpus

    @property
    def work(self) -> float:
        """GPU seconds that it does at most: a job is ended at its limit."""
        return min(self.duration, self.limit) * self.gpus * self.milli / MILLI


class Running(msgspec.Struct, gc=False):
    """A job that has GPUs, in this stint."""

    job: SimulatedJob
    pieces: Pieces
    gpus: int
    start: float
    end: float  # for the replay only: policies must not look at it
    believed: float  # when it ends at the latest, as far as anyone can know
    overhead: float  # seconds at the begin of the stint that do no work
    version: int = 0
    half: Pieces | None = None  # of an elastic job: what it would give back; worked out when asked


class StartJob(msgspec.Struct, frozen=True, gc=False):
    job: SimulatedJob
    pieces: Pieces
    gpus: int
    beside: bool = False  # a promise to another job, which stays true
    newcomer: bool = False  # then: no job that waited longer may start


class Preempt(msgspec.Struct, frozen=True, gc=False):
    ids: tuple[int, ...]
    why: str


class Resize(msgspec.Struct, frozen=True, gc=False):
    id: int
    pieces: Pieces
    gpus: int


class ReserveJob(msgspec.Struct, frozen=True, gc=False):
    job: SimulatedJob
    at: float


class Reject(msgspec.Struct, frozen=True, gc=False):
    job: SimulatedJob
    why: str


Action = StartJob | Preempt | Resize | ReserveJob | Reject


def check_cluster(cluster: SimulatedCluster) -> None:
    for name in ("nodes", "gpus", "rack"):
        if getattr(cluster, name) < 1:
            raise ConfigError(
                f"a cluster with {getattr(cluster, name)} for {name}", hint=f"{name} is at least 1"
            )


def impossible(job: SimulatedJob, cluster: SimulatedCluster) -> str | None:
    """Why this job could not run on an empty cluster, or None."""
    if job.gpus > cluster.total:
        return f"asks for {job.gpus} GPUs, the cluster has {cluster.total}"
    if cluster.cpus and job.cpus > cluster.cpus:
        return f"asks for {job.cpus:g} CPUs, the cluster has {cluster.cpus:g}"
    if cluster.memory_gib and job.memory_gib > cluster.memory_gib:
        return f"asks for {job.memory_gib:g} GiB, the cluster has {cluster.memory_gib:g}"
    return None
