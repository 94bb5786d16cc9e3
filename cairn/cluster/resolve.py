"""Resolution of a job on a cluster: a plan, or a refusal with the reason. Pure: the time is an argument, no
I/O.

    resolve(Job, Cluster) -> Plan        backend.render(Plan) -> text or objects        backend.submit

Decides nothing about when: the queue of the engine does.
"""

import datetime

import msgspec

from cairn.cluster.inventory import ClusterInventory, ClusterNode
from cairn.cluster.spec import Job, Role, Topology
from cairn.cluster.unsupported_settings import unused
from cairn.core.errors import CairnError, did_you_mean
from cairn.core.units import format_bytes, parse_bytes


class CannotRun(CairnError):
    """The job could wait for ever: no state of this cluster would let it run."""


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A role with everything filled in."""

    role: str
    argv: list[str]
    env: dict[str, str]
    image: str | None
    least: int  # nodes
    most: int
    ranks: int  # of each node
    gpus: int  # of each node
    mig: str
    cpus: float
    memory: int  # bytes
    elastic: bool  # through torch elastic

    @property
    def world(self) -> int:
        return self.most * self.ranks


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a backend."""

    job: Job
    engine: str
    groups: list[NodeGroup]
    notes: list[str] = []  # choices that were made, each with its reason
    avoid: list[str] = []  # nodes that are not to be used (`cordon_list`)

    @property
    def nodes(self) -> int:
        return sum(group.most for group in self.groups)


def resolve(job: Job, cluster: ClusterInventory, now: datetime.datetime | None = None) -> JobPlan:
    """The plan, or CannotRun with the numbers that do not fit. Without `now` nothing is too late."""
    _check_queue(job, cluster)
    _check_abilities(job, cluster)
    notes = unused(job, cluster.engine)
    job = _in_time(job, cluster, now, notes)
    if job.topology.required and cluster.checked and len(cluster.nodes) == 1:
        job = msgspec.structs.replace(job, topology=Topology())  # one machine is near enough
    groups = [_group(job, role) for role in job.roles]
    for group in groups:
        _check_image(group, job, cluster, notes)
    if cluster.checked:
        groups = _fit(job, groups, cluster, notes)
    if job.gang and len(groups) > 1:
        notes.append(f"one gang of {sum(group.most for group in groups)} nodes: all or none")
    return JobPlan(job=job, engine=cluster.engine, groups=groups, notes=list(dict.fromkeys(notes)))


def _group(job: Job, role: Role) -> NodeGroup:
    return NodeGroup(
        role=role.name,
        argv=role.argv,
        env={**_served(job, role), **job.env, **role.env},
        image=role.image or job.image,
        least=role.least,
        most=role.most,
        ranks=role.ranks_per_node,
        gpus=role.gpus,
        mig=role.mig,
        cpus=role.cpus,
        memory=parse_bytes(role.memory),
        elastic=role.start == "elastic" and job.kind == "train",
    )


def _served(job: Job, role: Role) -> dict[str, str]:
    """The server listens where the job says that it does."""
    ours = job.kind == "serve" and role.argv[:2] == ["cairn", "serve"]
    return {"CAIRN_SERVE_PORT": str(job.port)} if ours else {}


def _check_queue(job: Job, cluster: ClusterInventory) -> None:
    if job.queue is None or (not cluster.checked and not cluster.queues):
        return
    if cluster.queues is None:
        raise CannotRun(
            f"job '{job.name}' names the queue '{job.queue}', and {cluster.engine} has no queues",
            hint="leave `queue` out, or launch it on slurm or kubernetes",
        )
    if job.queue not in cluster.queues:
        there = f"{cluster.engine} has: {', '.join(sorted(cluster.queues)) or 'no queue at all'}"
        raise CannotRun(
            f"no queue '{job.queue}' on {cluster.engine}",
            hint=did_you_mean(job.queue, cluster.queues, otherwise=there),
        )


def _check_abilities(job: Job, cluster: ClusterInventory) -> None:
    if job.array.count > 1 and cluster.engine != "slurm":
        raise CannotRun(
            f"job '{job.name}' is an array of {job.array.count}, and {cluster.engine} has no job arrays",
            hint="launch it on slurm, or launch each as a job of its own",
        )
    if job.after and cluster.engine == "kubernetes":
        raise CannotRun(
            f"job '{job.name}' waits for other jobs ({', '.join(job.after)}), which kubernetes cannot do",
            hint="launch it on slurm, ray or local, or when the others are done",
        )
    for role in job.roles:
        if role.mig and cluster.engine == "ray":
            raise CannotRun(
                f"role '{role.name}' asks for {role.mig} slices, and ray counts GPUs only",
                hint="start Ray's nodes with --num-gpus as many slices, and leave `mig` out",
            )
        if job.kind == "serve" and role.most > 1 and role.argv[:2] == ["cairn", "serve"]:
            raise CannotRun(
                f"role '{role.name}' has {role.most} nodes, and one copy of `cairn serve` runs on one",
                hint="nodes = 1 with --tensor-parallel-size; scale.most is for more copies",
            )
    _check_nearness(job, cluster)


def _check_nearness(job: Job, cluster: ClusterInventory) -> None:
    """Reject topologies that an engine cannot express: Slurm knows hosts and leaf switches only."""
    nodes, level = sum(role.least for role in job.roles), job.topology.required
    if cluster.engine == "slurm" and level == "block":
        raise CannotRun(
            f"job '{job.name}' requires one block, and slurm can only be asked for one rack (a leaf switch)",
            hint='topology.required = "rack", or topology.preferred = "block"',
        )
    if cluster.engine == "slurm" and level == "host" and nodes > 1:
        raise CannotRun(
            f"job '{job.name}' requires {nodes} nodes on one host, and a node of slurm is a host",
            hint='nodes = 1 with more `ranks`, or topology.required = "rack"',
        )


def _in_time(
    job: Job, cluster: ClusterInventory, now: datetime.datetime | None, notes: list[str]
) -> Job:
    """A deadline that has passed is refused; where the engine knows none, the time that is left is the limit."""
    if job.deadline is None or now is None:
        return job
    left = (job.deadline - now).total_seconds()
    if left <= 0:
        raise CannotRun(
            f"the deadline of job '{job.name}', {job.deadline.isoformat()}, has passed",
            hint="a later one, or none",
        )
    if cluster.engine != "kubernetes":
        return job
    notes.append(
        "kubernetes has no deadlines: what is left until then limits the run, not the wait"
    )
    return msgspec.structs.replace(job, time_limit=f"{max(1, min(left, job.seconds)):.0f}s")


def _check_image(group: NodeGroup, job: Job, cluster: ClusterInventory, notes: list[str]) -> None:
    if cluster.needs_image and group.image is None:
        raise CannotRun(
            f"role '{group.role}' of job '{job.name}' names no image, and {cluster.engine} runs nothing else",
            hint='image = "cairn:cuda", built from the Dockerfile (docs/deploy.md)',
        )
    if group.image is not None and cluster.engine in ("local", "ray"):
        notes.append(f"image '{group.image}' is not used: {cluster.engine} runs processes")


def _fit(
    job: Job, groups: list[NodeGroup], cluster: ClusterInventory, notes: list[str]
) -> list[NodeGroup]:
    """Into all nodes, or into the first domain that holds the job where nearness is required."""
    refused: list[CannotRun] = []
    for nodes in _domains(job, groups, cluster):
        try:
            return _placed(job, groups, msgspec.structs.replace(cluster, nodes=nodes), notes)
        except CannotRun as error:
            refused.append(error)
    raise refused[0]


def _placed(
    job: Job, groups: list[NodeGroup], cluster: ClusterInventory, notes: list[str]
) -> list[NodeGroup]:
    """Largest nodes first into what is there; a role with (least, most) takes what it gets."""
    left = {node.name: node for node in cluster.nodes}
    placed: dict[str, NodeGroup] = {}
    fewer: list[str] = []
    for group in sorted(groups, key=lambda g: (-g.gpus, -g.cpus, g.role)):
        nodes = _take(group, left, cluster.shares_nodes)
        if nodes < group.least:
            raise _too_large(job, group, nodes, cluster)
        if nodes < group.most:
            fewer.append(
                f"role '{group.role}' gets {nodes} of {group.most} nodes: more are not there"
            )
        most = nodes if cluster.engine in ("local", "ray") else group.most
        placed[group.role] = msgspec.structs.replace(group, most=most)
    notes += fewer
    return [placed[group.role] for group in groups]


def _domains(
    job: Job, groups: list[NodeGroup], cluster: ClusterInventory
) -> list[list[ClusterNode]]:
    """All nodes; where nearness is required, those of each domain, the largest first."""
    level = job.topology.required
    if (
        level is None
        or cluster.engine == "local"
        or (level == "host" and cluster.engine == "slurm")
    ):
        return [cluster.nodes]
    if level == "host":
        alone = sorted(cluster.nodes, key=lambda n: (-n.gpus, -n.cpus, n.name))
        return [[node] for node in alone] or [[]]
    domains: dict[str, list[ClusterNode]] = {}
    for node in cluster.nodes:
        if level in node.domains:
            domains.setdefault(node.domains[level], []).append(node)
    if not domains:
        raise CannotRun(
            f"job '{job.name}' requires one {level}, and no node of {cluster.engine} says where it is",
            hint=f'label the nodes, or topology.preferred = "{level}"',
        )
    needed = sum(group.least for group in groups)
    by_size = sorted(domains, key=lambda name: (len(domains[name]), name), reverse=True)
    largest = by_size[0]
    if len(domains[largest]) < needed and not cluster.shares_nodes:
        raise CannotRun(
            f"job '{job.name}' requires {needed} nodes in one {level}; "
            f"the largest, {largest}, has {len(domains[largest])}",
            hint=f'fewer nodes, or topology.preferred = "{level}"',
        )
    return [domains[name] for name in by_size]


def _take(group: NodeGroup, left: dict[str, ClusterNode], shares: bool) -> int:
    """Number of nodes of a group that fit; they are removed from the remaining nodes."""
    count = 0
    for name in sorted(left, key=lambda n: (left[n].gpus, left[n].cpus, n)):
        while count < group.most and name in left and _holds(left[name], group):
            count += 1
            if shares:
                left[name] = _less(left[name], group)
            else:
                del left[name]
    return count


def _holds(node: ClusterNode, group: NodeGroup) -> bool:
    gpus = node.mig.get(group.mig, 0) if group.mig else node.gpus
    memory = not node.memory or node.memory >= group.memory
    return gpus >= group.gpus and node.cpus >= group.cpus and memory


def _less(node: ClusterNode, group: NodeGroup) -> ClusterNode:
    mig = dict(node.mig)
    if group.mig:
        mig[group.mig] -= group.gpus
    return msgspec.structs.replace(
        node,
        cpus=round(node.cpus - group.cpus, 6),  # shares such as 0.1 add up to less than they are
        mig=mig,
        gpus=node.gpus - (0 if group.mig else group.gpus),
        memory=max(1, node.memory - group.memory) if node.memory else 0,
    )


def _too_large(job: Job, group: NodeGroup, count: int, cluster: ClusterInventory) -> CannotRun:
    kind = f"{group.mig} slices" if group.mig else "GPUs"
    each = f"{group.gpus} {kind}, {group.cpus:g} CPUs and {format_bytes(group.memory)}"
    nodes, level = cluster.nodes, job.topology.required
    near = f" in one {level}" if level and cluster.engine != "local" else ""
    if not nodes:
        there = f"{cluster.engine} has no nodes"
    else:
        most = [
            max(node.mig.get(group.mig, 0) if group.mig else node.gpus for node in nodes),
            max(node.cpus for node in nodes),
            max(node.memory for node in nodes),
        ]
        memory = f" and {format_bytes(most[2])}" if most[2] else ""
        has = f"has {most[0]} {kind}, {most[1]:g} CPUs{memory}"
        there = f"the largest of {len(nodes)} nodes{near} {has}"
        if len(nodes) == 1:
            which = "this machine" if cluster.engine == "local" else f"the only node{near}"
            there = f"{which} {has}{' for all of them' if cluster.shares_nodes else ''}"
    return CannotRun(
        f"job '{job.name}' needs {group.least} nodes of {each} for role '{group.role}'; "
        f"{there}, so {count} fit",
        hint="ask for less of what is short (a share of a CPU, such as 0.5, is allowed), or launch it elsewhere",
    )
