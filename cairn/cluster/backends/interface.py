"""Interface of an engine, and the errors that all engines share.

    look() -> Cluster -resolve-> Plan -render-> text          (pure; --dry-run stops here)
                                      -submit-> Record -status, logs, stop->

Two kinds of engine: those that look after a job themselves (Slurm, Kubernetes), and those that only hold
processes, where `supervise` does it (local, Ray).
"""

from collections.abc import Iterator
from typing import Protocol

from cairn.cluster.inventory import ClusterInventory
from cairn.cluster.records import JobRecord, JobStatus
from cairn.cluster.resolve import JobPlan
from cairn.core.errors import CairnError


class EngineMissing(CairnError):
    """The engine is not installed here."""


class EngineUnreachable(CairnError):
    """The engine is installed and does not respond."""


class AlreadyEnded(CairnError):
    """There is nothing to stop."""


class SubmitFailed(CairnError):
    """The engine refused the job."""


class Backend(Protocol):
    """Interface of an engine."""

    name: str

    def look(self) -> ClusterInventory:
        """Query the cluster; raises EngineMissing or EngineUnreachable."""
        ...

    def unseen(self) -> ClusterInventory:
        """An assumed cluster for a dry run."""
        ...

    def render(self, plan: JobPlan) -> str:
        """Render the submission as text. Pure."""
        ...

    def submit(self, plan: JobPlan, record: JobRecord) -> JobRecord: ...

    def status(self, record: JobRecord) -> JobStatus: ...

    def lines(self, record: JobRecord, follow: bool) -> Iterator[str]:
        """The log, all nodes together; with `follow` until the job ends."""
        ...

    def stop(self, record: JobRecord) -> None:
        """Ends it and waits until nothing of it is left."""
        ...
