"""Nodes out of a Ray cluster: one placement group is the gang, one actor in each of its bundles is a node.

    placement group [{GPU: 8}] x 4      all or nothing; a lost bundle is placed again on a spare node
         |-- NodeAgent -- agent -- ranks

The supervisor is Ray's driver: when it goes, however it goes, Ray takes actors and placement group back.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cairn.cluster.backends.interface import EngineUnreachable
from cairn.cluster.backends.ray_node import NODE_ADDRESS, NodeAgent
from cairn.cluster.node_reservation import LOST, Handle, ReservedNode
from cairn.cluster.resolve import JobPlan, NodeGroup
from cairn.core.errors import CairnError
from cairn.core.units import format_bytes

NODE_LABEL = "ray.io/node-id"  # which every node of Ray has
LOCAL = "local"  # the address of a Ray that is started for one job, where there is none
KNOCK_S = 5.0
LAST_WORD_S = 10.0  # for an actor to end everything that it has started
UNTIL_PLACED_S = 120.0  # how long a new node may die before it has started once
UNANSWERED_S = 60.0  # a node whose actor does not answer for so long has gone, whatever Ray says
STORE_BYTES = 100 << 20  # its object store: a job's nodes send no objects


class RayNode:
    """A node that is an actor. Never blocks: what has been asked is looked up at the next poll."""

    def __init__(self, make: Callable[[], tuple[Any, Any]], log: Path) -> None:
        self.make, self.log = make, log
        self.actor, self.asked = make()  # `asked` is the answer that is awaited
        self.running = False
        self.offset = 0
        self.patience = time.monotonic() + UNTIL_PLACED_S
        self.asked_at = time.monotonic()

    def poll(self) -> int | None:
        import ray

        ready, _ = ray.wait([self.asked], timeout=0)
        if not ready:
            return self._unanswered()
        self.asked_at = time.monotonic()
        try:
            answer = ray.get(self.asked)
        except ray.exceptions.RayError:  # the actor, its worker or its node has gone
            self._kill()
            if self.running or time.monotonic() > self.patience:
                return LOST
            # It was sent to a node that Ray does not yet know to be dead.
            time.sleep(0.5)
            self.actor, self.asked = self.make()
            return None
        status = self._logged(answer) if self.running else None
        self.running = True
        if status is None:
            self.asked = self.actor.look.remote(self.offset)
        else:
            self._kill()
        return status

    def _unanswered(self) -> int | None:
        """If the raylet of the driver is killed, no call ever fails: it is only never answered."""
        if not self.running or time.monotonic() - self.asked_at < UNANSWERED_S:
            return None
        self._kill()
        return LOST

    def _logged(self, answer: tuple[int | None, bytes]) -> int | None:
        status, data = answer
        if data:
            with self.log.open("ab") as out:
                out.write(data)
            self.offset += len(data)
        return status

    def end(self, kill: bool = False) -> None:
        import ray

        if not kill:
            self.actor.end.remote(False)
            return
        with contextlib.suppress(ray.exceptions.RayError):  # a node that has gone does not answer
            ray.get(self.actor.end.remote(True), timeout=LAST_WORD_S)
        self._kill()

    def _kill(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.actor, no_restart=True)


class RayReservation:
    """`address` is Ray's, or LOCAL."""

    loopback = False

    def __init__(self, address: str) -> None:
        connect(address)
        import ray

        self.address: str = ray.util.get_node_ip_address()
        self.group: Any = None

    def reserve(self, plan: JobPlan) -> str | None:
        import ray
        from ray.util.placement_group import placement_group

        if self.group is None:
            bundles = bundles_of(plan)
            self.group = placement_group(
                bundles,
                name=f"cairn-{plan.job.name}",
                **_checked(placement_of(plan)),
                **_elsewhere(plan, ray.nodes()),
            )
            self.ready = self.group.ready()
            self.asks = f"{len(bundles)} nodes of {_words(plan.groups[0])}"
        ready, _ = ray.wait([self.ready], timeout=0.2)
        return None if ready else f"waiting for {self.asks} at once; free now: {_free()}"

    def start(
        self, reserved: ReservedNode, argv: list[str], env: dict[str, str], log: Path
    ) -> Handle:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=reserved.index
        )
        group = reserved.group
        kind = ray.remote(NodeAgent).options(
            num_cpus=group.cpus, num_gpus=group.gpus, scheduling_strategy=place, max_restarts=0
        )
        if "torch.distributed.run" in argv:
            at = argv.index("--no-python")
            argv = [*argv[:at], NODE_ADDRESS, *argv[at:]]

        def make() -> tuple[Any, Any]:
            actor: Any = kind.remote()
            return actor, actor.start.remote(argv, env, os.getcwd())

        return RayNode(make, log)

    def release(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if self.group is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(self.group)
            self.group = None
        ray.shutdown()


def bundles_of(plan: JobPlan) -> list[dict[str, float]]:
    """Placement-group bundles, one for each node in order. Pure."""
    return [_bundle(group) for group in plan.groups for _ in range(group.most)]


def placement_of(plan: JobPlan) -> dict[str, Any]:
    """Apart where that is possible, so that a lost machine is one lost node; together where the job says so.

    Nodes say in which rack or block they are by Ray's labels: ray start --labels rack=r7.
    """
    near = plan.job.topology
    if near.required in ("rack", "block"):
        return {"topology_strategy": {NODE_LABEL: "SPREAD", near.required: "STRICT_PACK"}}
    if near.required == "host":
        return {"strategy": "STRICT_PACK"}
    return {"strategy": "PACK" if near.preferred == "host" else "SPREAD"}


def _elsewhere(plan: JobPlan, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Not on nodes that are on the cordon list; Ray knows them by numbers of its own. Pure."""
    bad = [node["NodeID"] for node in nodes if node["NodeID"][:12] in plan.avoid]
    if not bad:
        return {}
    selector = {NODE_LABEL: f"!in({','.join(bad)})"}
    return {"bundle_label_selector": [selector for _ in bundles_of(plan)]}


def _checked(placement: dict[str, Any]) -> dict[str, Any]:
    """An older Ray knows no racks."""
    import inspect

    import ray
    from ray.util.placement_group import placement_group

    missing = placement.keys() - inspect.signature(placement_group).parameters.keys()
    if missing:
        raise CairnError(
            f"Ray {ray.__version__} cannot keep a job in one rack or block",
            hint="pip install 'ray>=2.60', or leave topology.required out",
        )
    return placement


def connect(address: str) -> None:
    """Connect as a driver and keep Ray's log lines out of the output."""
    import ray

    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "error",
        "configure_logging": True,
    }
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address == LOCAL:
        ray.init(address="local", include_dashboard=False, object_store_memory=STORE_BYTES, **quiet)
        return
    try:
        _knock(address)
        ray.init(address=address or "auto", **quiet)
    except (OSError, RuntimeError, ValueError) as error:  # a ConnectionError is an OSError
        raise EngineUnreachable(
            f"no Ray cluster answers at '{address or 'auto'}': {str(error).splitlines()[0]}",
            hint="ray start --head, or --address HOST:6379 of one that runs",
        ) from None


def _knock(address: str) -> None:
    """Ray itself tries for minutes to reach a head that is not there."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()


def _bundle(group: NodeGroup) -> dict[str, float]:
    bundle: dict[str, float] = {"CPU": group.cpus, "memory": group.memory}
    if group.gpus:
        bundle["GPU"] = group.gpus
    return bundle


def _words(group: NodeGroup) -> str:
    gpus = f"{group.gpus} GPUs, " if group.gpus else ""
    return f"{gpus}{group.cpus:g} CPUs and {format_bytes(group.memory)}"


def _free() -> str:
    import ray

    free = ray.available_resources()
    memory = format_bytes(free.get("memory", 0))
    return f"{free.get('GPU', 0):g} GPUs, {free.get('CPU', 0):g} CPUs, {memory}"
