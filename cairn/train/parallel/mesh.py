"""Device mesh: the rank of this process along each dimension, and its process groups.

    rank = (((pp_rank * dp + dp_rank) * fsdp + fsdp_rank) * cp + cp_rank) * tp + tp_rank

Neighbours along `tp` are neighbours in rank, so that those who talk most share a host; `pp` is outermost. Besides the
five axes there are groups that join several of them:

    data      dp x fsdp          who reads other samples
    replica   dp x fsdp x cp     who computes other tokens with the same weights
    ep        a part of data     who shares the experts; `expert_replica`: who holds the same experts
    pp_ends   first and last     who shares an embedding that is also the output projection

Opens no connection of its own: the process group exists before, or there is only one process (`Mesh.alone`).
"""

from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cairn.core.errors import ConfigError
from cairn.train.parallel.layout import Layout, check

ORDER = ("pp", "dp", "fsdp", "cp", "tp")  # outermost first
JOINED = {"data": ("dp", "fsdp"), "replica": ("dp", "fsdp", "cp")}
Group = Any  # a torch.distributed.ProcessGroup; None for a single rank
Place = dict[str, int]  # rank along each axis


class Mesh:
    """View of the layout from one process."""

    def __init__(self, layout: Layout, rank: int, groups: dict[str, Group], device: str) -> None:
        self.layout, self.device, self.world_rank = layout, device, rank
        self.place = place(layout, rank)
        self._groups = groups

    @classmethod
    def alone(cls, device: str = "cpu") -> "Mesh":
        """The only process: every axis has one rank and no group."""
        return cls(Layout(), 0, {}, device)

    @classmethod
    def join(cls, layout: Layout, device: str | None = None) -> "Mesh":
        """Every process of an initialised process group calls this with the same layout."""
        if not dist.is_initialized():
            if layout.world() == 1:
                return cls.alone(device or "cpu")
            raise ConfigError(
                f"a layout of {layout.world()} ranks ({layout.words()}) in a process on its own",
                hint="start the ranks and torch.distributed.init_process_group first",
            )
        check(layout, dist.get_world_size())
        backend = dist.get_backend()
        where = device or ("cuda" if "nccl" in backend else "cpu")
        return cls(layout, dist.get_rank(), _open_groups(layout, dist.get_rank()), where)

    # -- one axis -----------------------------------------------------------------------------

    def rank(self, axis: str) -> int:
        """This process along an axis, or within a joined group such as `data`."""
        return members(self.layout, axis, self.world_rank).index(self.world_rank)

    def size(self, axis: str) -> int:
        return group_size(self.layout, axis)

    def group(self, axis: str) -> Group:
        """The process group along an axis; None if it has one rank."""
        return self._groups.get(axis)

    def peer(self, axis: str, rank: int) -> int:
        """The world rank of another process along an axis, all else equal."""
        return world_rank(self.layout, self.place | {axis: rank})

    # -- joined axes --------------------------------------------------------------------------

    @property
    def data_rank(self) -> int:
        return self.rank("data")

    @property
    def data_ranks(self) -> int:
        return self.size("data")

    def everyone(self) -> Group:
        """All ranks; None if there is only one."""
        return dist.group.WORLD if self.layout.world() > 1 else None

    @cached_property
    def device_mesh(self) -> DeviceMesh | None:
        """Torch's own, for `fully_shard`: pp x dp x shard x tp, where shard is fsdp x cp."""
        if self.layout.world() == 1:
            return None
        sizes = self.layout
        shape = (sizes.pp, sizes.dp, sizes.fsdp * sizes.cp, sizes.tp)
        return init_device_mesh(
            torch.device(self.device).type, shape, mesh_dim_names=("pp", "dp", "shard", "tp")
        )


# -- ranks as numbers (no torch) ------------------------------------------------------------------


def place(layout: Layout, rank: int) -> Place:
    """Ranks along the axes from the rank in the world."""
    coordinates: Place = {}
    for axis in reversed(ORDER):
        rank, coordinates[axis] = divmod(rank, getattr(layout, axis))
    return coordinates


def world_rank(layout: Layout, where: Place) -> int:
    rank = 0
    for axis in ORDER:
        rank = rank * getattr(layout, axis) + where[axis]
    return rank


def group_size(layout: Layout, axis: str) -> int:
    if axis == "ep":
        return layout.ep
    if axis == "expert_replica":
        return layout.data_ranks() * layout.cp // layout.ep
    size = 1
    for part in JOINED.get(axis, (axis,)):
        size *= getattr(layout, part)
    return size


def members(layout: Layout, axis: str, rank: int) -> list[int]:
    """The world ranks of the group along `axis` that `rank` belongs to, in order."""
    return list(_by_key(layout, axis)[_key(layout, axis, rank)])


@cache
def _by_key(layout: Layout, axis: str) -> dict[tuple[int, ...], list[int]]:
    """All groups along an axis, in one pass over the ranks: a job of thousands of ranks starts with this."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world()):
        groups.setdefault(_key(layout, axis, rank), []).append(rank)
    return groups


def _key(layout: Layout, axis: str, rank: int) -> tuple[int, ...]:
    """Key that identifies the group of a rank along an axis."""
    where = place(layout, rank)
    data = where["dp"] * layout.fsdp + where["fsdp"]
    if axis == "ep":
        return (where["pp"], where["cp"], where["tp"], data // layout.ep)
    if axis == "expert_replica":
        return (where["pp"], where["tp"], data % layout.ep)
    free = JOINED.get(axis, (axis,))
    return tuple(where[a] for a in ORDER if a not in free)


def _open_groups(layout: Layout, rank: int) -> dict[str, Group]:
    """All groups with more than one member; every process makes every group, in the same order."""
    opened: dict[str, Group] = {}
    by_ranks: dict[tuple[int, ...], Group] = {}
    for axis in (*ORDER, *JOINED, "pp_ends", "ep", "expert_replica"):
        for ranks in _all_groups(layout, axis):
            if len(ranks) < 2:
                continue
            if ranks not in by_ranks:
                by_ranks[ranks] = dist.new_group(list(ranks))
            if rank in ranks:
                opened[axis] = by_ranks[ranks]
    return opened


def _all_groups(layout: Layout, axis: str) -> list[tuple[int, ...]]:
    if axis == "pp_ends":  # the first and the last stage, which may share an embedding
        return [tuple(dict.fromkeys((line[0], line[-1]))) for line in _all_groups(layout, "pp")]
    if axis == "expert_replica" and layout.ep == 1:
        return []  # the same as `replica`
    return sorted(map(tuple, _by_key(layout, axis).values()))
