"""Ray as an engine: looks at the cluster, hands the job to a supervisor that is Ray's driver.

    cairn launch -> supervisor (driver) -> placement group -> one actor per node -> agent -> ranks

Ray has no queue, no priority and no preemption: a job waits for its placement group; `cairn jobs why` says for what.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator

import msgspec

from cairn.cluster import records, supervisor_process
from cairn.cluster.backends.interface import EngineMissing, EngineUnreachable
from cairn.cluster.backends.local import tail
from cairn.cluster.elastic import Rendezvous, agent_argv, rank_argv
from cairn.cluster.inventory import ClusterInventory, ClusterNode
from cairn.cluster.records import JobRecord, JobStatus
from cairn.cluster.resolve import JobPlan
from cairn.cluster.secret_env import write_private


class Ray:
    """`--on ray`"""

    name = "ray"

    def __init__(self, address: str = "") -> None:
        self.address = address or os.environ.get("RAY_ADDRESS", "")

    def look(self) -> ClusterInventory:
        if importlib.util.find_spec("ray") is None:
            raise EngineMissing(
                "the Python package 'ray' is not installed",
                hint=f"{sys.executable} -m pip install 'ray>=2.50'",
            )
        import ray

        from cairn.cluster.backends.ray_placement import LOCAL, connect

        try:
            connect(self.address)
        except EngineUnreachable:
            if self.address:
                raise
            self.address = LOCAL
            return self._local()
        try:
            return ClusterInventory(
                engine=self.name, nodes=nodes_of(ray.nodes()), shares_nodes=True
            )
        finally:
            ray.shutdown()

    def _local(self) -> ClusterInventory:
        from cairn.cluster.backends.local import Local

        print("note: no Ray cluster runs here; one is started for this job", file=sys.stderr)
        return msgspec.structs.replace(Local().look(), engine=self.name)

    def unseen(self) -> ClusterInventory:
        return ClusterInventory(engine=self.name, checked=False)

    def render(self, plan: JobPlan) -> str:
        return render(plan)

    def submit(self, plan: JobPlan, record: JobRecord) -> JobRecord:
        write_private(record.folder / "plan.json", msgspec.json.encode(plan))
        return supervisor_process.begin(msgspec.structs.replace(record, address=self.address))

    def status(self, record: JobRecord) -> JobStatus:
        return records.read_status(record)

    def lines(self, record: JobRecord, follow: bool) -> Iterator[str]:
        return tail(record, follow)

    def stop(self, record: JobRecord) -> None:
        supervisor_process.stop(record)


def nodes_of(listed: list[dict]) -> list[ClusterNode]:
    """Ray's own list as ours; nodes that died stay in it for ever."""
    nodes = []
    for node in listed:
        if node["Alive"]:
            has = node["Resources"]
            nodes.append(
                ClusterNode(
                    name=node["NodeID"][:12],
                    gpus=int(has.get("GPU", 0)),
                    cpus=has.get("CPU", 0.0),
                    memory=int(has.get("memory", 0)),
                    domains=dict(node.get("Labels") or {}),
                )
            )
    return nodes


def render(plan: JobPlan) -> str:
    """The placement group and the command of every bundle."""
    from cairn.cluster.backends.ray_placement import bundles_of, placement_of

    actors = []
    for group in plan.groups:
        rendezvous = Rendezvous(endpoint="DRIVER:PORT", run=f"{plan.job.name}-{group.role}-0")
        argv = (
            agent_argv(plan.job, group, rendezvous, None, "python")
            if group.elastic
            else rank_argv(group.argv, "python")
        )
        actors.append({"role": group.role, "count": group.most, "argv": argv})
    document = {
        "placement_group": {
            "name": f"cairn-{plan.job.name}",
            **placement_of(plan),
            "bundles": bundles_of(plan),
        },
        "actors": actors,
    }
    return msgspec.json.format(msgspec.json.encode(document)).decode() + "\n"
