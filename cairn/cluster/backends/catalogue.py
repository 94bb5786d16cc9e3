"""Engines by name; an engine is imported only when it is used."""

from cairn.cluster.backends.interface import Backend
from cairn.cluster.node_reservation import NodeReservation
from cairn.cluster.records import JobRecord
from cairn.core.errors import UsageError, did_you_mean

ENGINES = ("local", "ray", "slurm", "kubernetes")


def backend(name: str, target: str = "", address: str = "") -> Backend:
    match name:
        case "local":
            from cairn.cluster.backends.local import Local

            return Local()
        case "ray":
            from cairn.cluster.backends.ray import Ray

            return Ray(address)
        case "slurm":
            from cairn.cluster.backends.slurm import Slurm

            return Slurm()
        case "kubernetes":
            from cairn.cluster.backends.kubernetes import Kubernetes

            return Kubernetes(target or "jobset", address)
    raise UsageError(
        f"no engine '{name}'",
        hint=did_you_mean(name, ENGINES, otherwise=f"there are: {', '.join(ENGINES)}"),
    )


def backend_of(record: JobRecord) -> Backend:
    return backend(record.engine, record.target, record.address)


def reservation_of(record: JobRecord) -> NodeReservation:
    """The reservation that provides the nodes of a job to its supervisor."""
    if record.engine == "ray":
        from cairn.cluster.backends.ray_placement import RayReservation

        return RayReservation(record.address)
    from cairn.cluster.backends.local import LocalReservation

    return LocalReservation(record)
