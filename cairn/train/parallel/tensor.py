"""Tensor and sequence parallelism under autograd: the verbs of `Shards`, each with its backward.

    TensorShards      x whole on every rank between the layers
        enter   forward nothing,    backward all-reduce       f of Megatron (arXiv:1909.08053)
        reduce  forward all-reduce, backward nothing          g

    SequenceShards    x cut by tokens between the layers: [T / tp, D], which norms and sums then work on
        enter   forward all-gather, backward reduce-scatter   (arXiv:2205.05198)
        reduce  forward reduce-scatter, backward all-gather

The two move as many bytes; the second keeps 1/tp of the activations. Layers are those that serve; they call the verbs
and do not know which form they got. Under SequenceShards every weight that is whole on each rank has seen only some
tokens: `wrap` sums those gradients over the ranks once, after the last backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cairn.train.parallel.collectives import all_gather, all_reduce, reduce_scatter, size_of
from cairn.train.parallel.mesh import Group


class TensorShards:
    """Tensor-parallel shard of each layer."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = size_of(group)

    def enter(self, x: Tensor) -> Tensor:
        return _Enter.apply(x, self.group)

    def leave(self, gradient: Tensor) -> Tensor:
        """Backward of `enter`, for operations with a backward of their own."""
        return all_reduce(gradient, self.group)

    def reduce(self, x: Tensor) -> Tensor:
        return _Reduce.apply(x, self.group)

    def gather(self, x: Tensor) -> Tensor:
        return _GatherLast.apply(x, self.group, self.rank)

    def whole(self, weight: Tensor) -> Tensor:
        return self.enter(weight)


class SequenceShards(TensorShards):
    """Tensor parallelism with sequence parallelism: tokens between the layers are sharded."""

    def enter(self, x: Tensor) -> Tensor:
        return GatherRows.apply(x, self.group)

    def leave(self, gradient: Tensor) -> Tensor:
        return reduce_scatter(gradient, self.group)

    def reduce(self, x: Tensor) -> Tensor:
        return ScatterRows.apply(x, self.group)

    def whole(self, weight: Tensor) -> Tensor:
        return weight  # summed with all others after backward

    def mine(self, x_T: Tensor) -> Tensor:
        """This rank's share of something that is there for every token."""
        return x_T.chunk(self.size)[self.rank]


class VocabularyShards(SequenceShards):
    """Shards of embedding and LM head: tokens are sharded after the lookup and gathered before the logits.

    The stage gathers them once (`GatherRows`, whose backward sums), so entering does nothing more; a loss may then
    take the tokens in pieces.
    """

    def enter(self, x: Tensor) -> Tensor:
        return x


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return all_reduce(gradients[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class GatherRows(torch.autograd.Function):
    """Forward: the rows of all ranks; backward: the sum of all ranks' gradients of mine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return reduce_scatter(gradients[0], ctx.group), None


class ScatterRows(torch.autograd.Function):
    """Forward: my rows of the sum over all ranks; backward: the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return all_gather(gradients[0], ctx.group), None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, rank: int) -> Tensor:
        ctx.rank, ctx.width = rank, x.shape[-1]
        parts = all_gather(x[None], group)  # [ranks, ..., n]
        return torch.cat(parts.unbind(0), dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        first = ctx.rank * ctx.width
        return gradients[0][..., first : first + ctx.width].contiguous(), None, None
