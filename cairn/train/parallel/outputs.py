"""Gathering of per-token head outputs on every rank, for all tokens of its microbatches.

    cp   each rank has the values of its tokens     gathered, and put back into the order of the batch
    pp   only the last stage has any                broadcast to the others
    tp   alike on all ranks already                 a head sees whole hidden states; see `heads`

Values are [T, ...] by name. Without gradients: nothing here is differentiable.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cairn.train.parallel.collectives import all_gather, size_of
from cairn.train.parallel.context import indices
from cairn.train.parallel.layout import Attention
from cairn.train.parallel.mesh import Group

Values = dict[str, Tensor]  # by name, one row for each token


def in_batch_order(local: Mapping[str, Tensor], group: Group, kind: Attention) -> Values:
    """The rows of all ranks of cp, where they stand in the microbatch."""
    if group is None:
        return dict(local)
    return {name: _ordered(value, group, kind) for name, value in local.items()}


def _ordered(local_T: Tensor, group: Group, kind: Attention) -> Tensor:
    size = size_of(group)
    gathered_T = all_gather(local_T, group)
    places = [indices(len(gathered_T), rank, size, kind) for rank in range(size)]
    whole_T = torch.empty_like(gathered_T)
    whole_T[torch.cat(places).to(local_T.device)] = gathered_T
    return whole_T


def from_last_stage(
    outputs: Sequence[Values], group: Group, source: int, device: str
) -> list[Values]:
    """`found`: by microbatch, empty on all ranks of pp but `source`, a rank of the world."""
    if group is None:
        return list(outputs)
    is_source = dist.get_rank() == source
    shapes = [[(name, x.shape, x.dtype) for name, x in values.items()] for values in outputs]
    announced = [shapes if is_source else None]
    dist.broadcast_object_list(announced, source, group, torch.device(device))
    if not is_source:
        outputs = [
            {name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in values}
            for values in announced[0] or []
        ]
    for values in outputs:
        for name in values:
            values[name] = values[name].contiguous()
            dist.broadcast(values[name], source, group)
    return list(outputs)
