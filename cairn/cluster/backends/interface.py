"""What an engine has to be able to do for a job, and the errors all of them share.

    look() -> Cluster -resolve-> Plan -render-> text          (pure; --dry-run stops here)
                                      -submit-> Record -status, logs, stop->

Two kinds of engine: those that look after a job themselves (Slurm, Kubernetes), and those that only hold
processes, where `supervise` does it (local, Ray).
"""

from collections.abc import Iterator
from typing import Protocol

from cairn.cluster.inventory import Cluster
from cairn.cluster.records import Record, Status
from cairn.cluster.resolve import Plan
from cairn.core.errors import CairnError


class EngineMissing(CairnError):
    """The engine is not installed here."""


class EngineUnreachable(CairnError):
    """It is installed, and does not answer."""


class AlreadyEnded(CairnError):
    """There is nothing to stop."""


class SubmitFailed(CairnError):
    """The engine refused the job."""


class Backend(Protocol):
    """One engine."""

    name: str

    def look(self) -> Cluster:
        """What there is; EngineMissing or EngineUnreachable where there is nothing to look at."""
        ...

    def unseen(self) -> Cluster:
        """For a dry run: the engine as it is on paper."""
        ...

    def render(self, plan: Plan) -> str:
        """What would be submitted, for a person to read. Pure."""
        ...

    def submit(self, plan: Plan, record: Record) -> Record: ...

    def status(self, record: Record) -> Status: ...

    def lines(self, record: Record, follow: bool) -> Iterator[str]:
        """The log, all nodes together; with `follow` until the job ends."""
        ...

    def stop(self, record: Record) -> None:
        """Ends it and waits until nothing of it is left."""
        ...
