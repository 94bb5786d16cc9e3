"""Inventory of a cluster: nodes, their topology, and queues. Filled in by a backend, read by `resolve`."""

import msgspec


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True):
    """A machine with its total resources; free resources are left to the engine."""

    name: str
    gpus: int = 0
    cpus: float = 1.0
    memory: int = 0  # bytes; 0: unknown, and then not checked
    mig: dict[str, int] = {}  # slices by profile
    domains: dict[str, str] = {}  # level -> the domain it lies in, such as {"rack": "r7"}


class ClusterInventory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can decide whether a job can ever run."""

    engine: str
    nodes: list[ClusterNode] = []
    queues: list[str] | None = None  # None: this engine has none
    needs_image: bool = False
    shares_nodes: bool = False  # several nodes of a job may lie on one machine, as on `local`
    checked: bool = True  # False: not checked (a dry run), so nothing is refused for its size
