"""Cross entropy over a vocabulary that is cut over ranks: no rank ever holds a token's scores of all words.

    scores [T, V / tp]  ->  largest, sum of exponentials, score of the target: three all-reduces of [T]

Backward needs no message: softmax minus one at the target, each rank for its own words.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cairn.models.linear.maps import Vocabulary
from cairn.train.parallel.collectives import all_reduce
from cairn.train.parallel.mesh import Group

IGNORED = -100


def sharded_token_losses(
    hidden_TD: Tensor,
    vocabulary: Vocabulary,
    targets_T: Tensor,
    softcap: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Of each token, float32, alike on all ranks; 0 where the target is IGNORED."""
    shards = vocabulary.shards
    scores_TV = vocabulary.local_logits(hidden_TD).float()
    if softcap:
        scores_TV = softcap * torch.tanh(scores_TV / softcap)
    first = vocabulary.rows * shards.rank
    words = max(0, min(vocabulary.rows, vocabulary.shape[0] - first))  # the rest is padding
    group = getattr(shards, "group", None)
    return _Losses.apply(scores_TV, targets_T, first, words, z_loss, group)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores_TV: Tensor,
        targets_T: Tensor,
        first: int,
        words: int,
        z: float,
        group: Group,
    ) -> Tensor:
        scores_TV = scores_TV.clone()
        scores_TV[:, words:] = float("-inf")
        largest_T = all_reduce(scores_TV.max(-1).values, group, dist.ReduceOp.MAX)
        exps_TV = (scores_TV - largest_T[:, None]).exp()
        total_T = all_reduce(exps_TV.sum(-1), group)
        lse_T = largest_T + total_T.log()
        local_T = targets_T - first
        mine_T = (local_T >= 0) & (local_T < words)
        at_T = local_T.where(mine_T, 0)
        target_T = all_reduce(scores_TV.gather(1, at_T[:, None])[:, 0].where(mine_T, 0.0), group)
        counts_T = targets_T != IGNORED
        ctx.save_for_backward(exps_TV.div_(total_T[:, None]), lse_T, at_T, mine_T, counts_T)
        ctx.z = z
        return (lse_T - target_T + z * lse_T.square()).where(counts_T, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shares_TV, lse_T, at_T, mine_T, counts_T = ctx.saved_tensors
        gradient_T = gradients[0].where(counts_T, 0.0)
        out_TV = shares_TV * (gradient_T * (1.0 + 2.0 * ctx.z * lse_T))[:, None]
        out_TV.scatter_add_(1, at_T[:, None], -(gradient_T * mine_T)[:, None])
        return out_TV, None, None, None, None, None
