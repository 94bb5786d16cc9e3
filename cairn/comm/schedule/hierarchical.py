"""Two levels: a fast network inside a node, a slow one along each rail between the nodes.

    node 0   node 1   node 2           rank = node * gpus + gpu
    [0 1]    [2 3]    [4 5]            rail g: the ranks with the same place in their node
     | `------|-`------|-`---- rail 1
     `--------`--------`------ rail 0

Gather: along every rail, then within every node. Backwards: reduce within the node, then along the
rail. Together that is the rail-aligned all-reduce: each GPU carries only its own share of the vector
over the slow network. All-to-all goes over the rail to the node of its destination, and from there
inside the node, as DeepEP does: n/gpus - 1 messages over the slow network instead of n - gpus.
"""

import numpy as np

from cairn.comm.schedule.ops import ScheduleError
from cairn.comm.schedule.plan import SchedulePlan

LARGEST_NODE = 8


def node_size(ranks: int, largest: int = LARGEST_NODE) -> int:
    """The largest node that divides the ranks into two nodes or more; 1 when none does."""
    return max(
        size for size in range(1, largest + 1) if size == 1 or ranks % size == 0 < ranks - size
    )


def two_level_gather(ranks: int, gpus: int | None = None) -> SchedulePlan:
    """Rings along the rails, then rings within the nodes."""
    gpus = _checked(ranks, gpus)
    nodes = ranks // gpus
    plan = SchedulePlan(ranks)
    rank = np.arange(ranks)
    node, gpu = np.divmod(rank, gpus)
    for step in range(nodes - 1):
        plan.send(rank, (node + 1) % nodes * gpus + gpu, chunk=(node - step) % nodes * gpus + gpu)
    every_node = np.arange(nodes) * gpus
    for step in range(gpus - 1):
        chunks = every_node + ((gpu - step) % gpus)[:, None]
        right = node * gpus + (gpu + 1) % gpus
        plan.send(rank[:, None], right[:, None], chunk=chunks)
    return plan


def two_hop_all_to_all(ranks: int, gpus: int | None = None) -> tuple[SchedulePlan, int]:
    """The plan and its slots: n to send, n received, n at the door of the node."""
    gpus = _checked(ranks, gpus)
    nodes = ranks // gpus
    plan = SchedulePlan(ranks)
    rank = np.arange(ranks)
    node, gpu = np.divmod(rank, gpus)
    local = np.arange(gpus)
    door = 2 * ranks  # slot door + from_node * gpus + to_gpu
    plan.copy(
        rank[:, None], (node * gpus)[:, None] + local, to=door + (node * gpus)[:, None] + local
    )
    for away in range(1, nodes):
        there = (node + away) % nodes * gpus
        plan.send(
            rank[:, None],
            (there + gpu)[:, None],
            chunk=there[:, None] + local,
            to=door + (node * gpus)[:, None] + local,
        )
    every_node = np.arange(nodes) * gpus
    plan.copy(rank[:, None], door + every_node + gpu[:, None], to=ranks + every_node + gpu[:, None])
    for away in range(1, gpus):
        neighbour = (gpu + away) % gpus
        plan.send(
            rank[:, None],
            (node * gpus + neighbour)[:, None],
            chunk=door + every_node + neighbour[:, None],
            to=ranks + every_node + gpu[:, None],
        )
    return plan, 3 * ranks


def _checked(ranks: int, gpus: int | None) -> int:
    gpus = node_size(ranks) if gpus is None else gpus
    if gpus < 1 or ranks % gpus:
        raise ScheduleError(
            f"{ranks} ranks do not fill nodes of {gpus}",
            hint=f"use nodes of {node_size(ranks, max(gpus, 1))}, or another number of ranks",
        )
    return gpus
