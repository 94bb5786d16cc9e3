"""The few collectives that training by hand needs, on tensors, along the first dimension.

Each takes a group of ranks; None is the only rank, and costs nothing. Autograd is not their business: `tensor`,
`context` and `expert` pair each with its backward. Names differ between versions of torch, and are settled here.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cairn.train.parallel.mesh import Group

# Newer torch has these, and warns about the older names.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def size_of(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """A new tensor: the sum over the ranks (or another `op`)."""
    if group is None:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=group)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    """All ranks' rows, one rank after another: [n, ...] -> [ranks * n, ...]."""
    if group is None:
        return x
    x = x.contiguous()
    out = x.new_empty((size_of(group) * x.shape[0], *x.shape[1:]))
    _GATHER(out, x, group=group)
    return out


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, of which each keeps its rows: [ranks * n, ...] -> [n, ...]."""
    if group is None:
        return x
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // size_of(group), *x.shape[1:]))
    _SCATTER(out, x, group=group)
    return out


def start_reduce_scatter(x: Tensor, group: Group) -> tuple[Tensor, Any]:
    """Asynchronous `reduce_scatter`: returns the result and a handle to wait for. `x` must live until then."""
    out = x.new_empty((x.shape[0] // size_of(group), *x.shape[1:]))
    return out, _SCATTER(out, x, group=group, async_op=True)


def all_to_all(
    x: Tensor, group: Group, sends: Sequence[int] | None = None, gets: Sequence[int] | None = None
) -> Tensor:
    """Rows to other ranks and theirs to us; `sends[i]` rows go to rank i, `gets[i]` come; None: as many to each."""
    if group is None:
        return x
    rows = x.shape[0] if gets is None else sum(gets)
    out = x.new_empty((rows, *x.shape[1:]))
    dist.all_to_all_single(
        out,
        x.contiguous(),
        None if gets is None else list(gets),
        None if sends is None else list(sends),
        group=group,
    )
    return out
