"""Log-probabilities of tokens from their hidden states, with the vocabulary whole or cut over ranks.

    scores [T, V / tp]  ->  largest, sum of exponentials, score of the target: three all-reduces of [T]

No rank ever holds a token's scores of all words. Backward needs no message: each rank has the gradient of its own
words, softmax and one at the target. Entropy takes one more sum, without gradients.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.loss.cross_entropy_rule import VocabShard
from cairn.models.linear.maps import Vocabulary
from cairn.train.parallel.collectives import all_reduce
from cairn.train.parallel.mesh import Group

IGNORED = -100


class LogProbs(NamedTuple):
    """Log probabilities of each token, float32 (float64 for float64 scores), equal on all ranks."""

    logp_T: Tensor  # of its target; 0 where the target is IGNORED
    lse_T: (
        Tensor | None
    )  # log of the sum of exponentials of all scores, if asked for; 0 where IGNORED


class Words(NamedTuple):
    """Vocabulary range of a rank."""

    first: int
    count: int  # the columns behind them are padding
    group: Group


def words_of(vocabulary: Vocabulary) -> Words:
    shards = vocabulary.shards
    first = vocabulary.rows * shards.rank
    count = max(0, min(vocabulary.rows, vocabulary.shape[0] - first))
    return Words(first, count, getattr(shards, "group", None))


class KernelOperands(NamedTuple):
    """Operands of the fused cross-entropy: hidden states, and this rank's rows of the LM head."""

    hidden_TD: Tensor
    weight_VD: Tensor
    shard: VocabShard | None  # None: all rows are here


def kernel_operands(hidden_TD: Tensor, vocabulary: Vocabulary) -> KernelOperands | None:
    """Operands of the kernel; None if the head has an adapter or any rank has no words, equally on all ranks."""
    if vocabulary.addend is not None:
        return None
    words, total = words_of(vocabulary), vocabulary.shape[0]
    if vocabulary.shards.size == 1:
        return KernelOperands(hidden_TD, vocabulary.matrix(), None)
    if vocabulary.rows * (vocabulary.shards.size - 1) >= total:
        return None
    highest = partial(all_reduce, group=words.group, op=dist.ReduceOp.MAX)
    shard = VocabShard(words.first, total, highest, partial(all_reduce, group=words.group))
    weight_VD = vocabulary.matrix()[: words.count]  # the rows behind them are padding
    return KernelOperands(vocabulary.shards.enter(hidden_TD), weight_VD, shard)


def scores_of(hidden_TD: Tensor, vocabulary: Vocabulary, softcap: float = 0.0) -> Tensor:
    """[T, V], or this rank's columns with -inf in those that are padding."""
    scores_TV = vocabulary.local_logits(hidden_TD)
    scores_TV = scores_TV if scores_TV.dtype == torch.float64 else scores_TV.float()
    if softcap:
        scores_TV = softcap * torch.tanh(scores_TV / softcap)
    words = words_of(vocabulary)
    if words.count < scores_TV.shape[1]:
        padding_V = torch.arange(scores_TV.shape[1], device=scores_TV.device) >= words.count
        scores_TV = scores_TV.masked_fill(padding_V, float("-inf"))
    return scores_TV


def log_probs(
    hidden_TD: Tensor,
    vocabulary: Vocabulary,
    targets_T: Tensor,
    softcap: float = 0.0,
    with_lse: bool = False,
) -> LogProbs:
    """Differentiable; holds the scores of these tokens, so give it a chunk of them at a time."""
    scores_TV = scores_of(hidden_TD, vocabulary, softcap)
    if vocabulary.shards.size > 1:
        return LogProbs(*_Sharded.apply(scores_TV, targets_T, words_of(vocabulary)))
    loss_T = F.cross_entropy(scores_TV, targets_T, reduction="none", ignore_index=IGNORED)
    lse_T = scores_TV.logsumexp(-1) * (targets_T != IGNORED) if with_lse else None
    return LogProbs(-loss_T, lse_T)


@torch.no_grad()
def entropies(hidden_TD: Tensor, vocabulary: Vocabulary, softcap: float = 0.0) -> Tensor:
    """Entropy at each token in nats: lse - sum of p * score."""
    scores_TV = scores_of(hidden_TD, vocabulary, softcap)
    group = words_of(vocabulary).group
    largest_T, total_T = _statistics(scores_TV, group)
    shares_TV = (scores_TV - largest_T[:, None]).exp() / total_T[:, None]
    weighed_TV = shares_TV * scores_TV.where(shares_TV > 0, 0.0)  # 0 * -inf is not 0
    mean_T = all_reduce(weighed_TV.sum(-1), group)
    return largest_T + total_T.log() - mean_T


def _statistics(scores_TV: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """The largest score of each token, and the sum of exponentials relative to it, over all ranks' words."""
    largest_T = all_reduce(scores_TV.max(-1).values, group, dist.ReduceOp.MAX)
    return largest_T, all_reduce((scores_TV - largest_T[:, None]).exp().sum(-1), group)


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, scores_TV: Tensor, targets_T: Tensor, words: Words
    ) -> tuple[Tensor, Tensor]:
        largest_T, total_T = _statistics(scores_TV, words.group)
        lse_T = largest_T + total_T.log()
        local_T = targets_T - words.first
        mine_T = (local_T >= 0) & (local_T < words.count)
        at_T = local_T.where(mine_T, 0)
        chosen_T = scores_TV.gather(1, at_T[:, None])[:, 0].where(mine_T, 0.0)
        chosen_T = all_reduce(chosen_T, words.group)
        counts_T = targets_T != IGNORED
        ctx.save_for_backward(scores_TV, lse_T, at_T, mine_T, counts_T)
        return (chosen_T - lse_T).where(counts_T, 0.0), lse_T.where(counts_T, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        scores_TV, lse_T, at_T, mine_T, counts_T = ctx.saved_tensors
        of_logp_T, of_lse_T = (gradient.where(counts_T, 0.0) for gradient in gradients)
        shares_TV = (scores_TV - lse_T[:, None]).exp()
        out_TV = shares_TV * (of_lse_T - of_logp_T)[:, None]
        out_TV.scatter_add_(1, at_T[:, None], (of_logp_T * mine_T)[:, None])
        return out_TV, None, None
