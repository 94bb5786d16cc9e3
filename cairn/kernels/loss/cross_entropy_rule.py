"""Definition of the cross-entropy loss, and the reduction over vocabulary shards. Pure torch; any device.

`cross_entropy_reference` is the specification: every kernel is held against it and against its autograd.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.kernels.arguments import FLOATS, INTEGERS, check, require

LOG2E = 1.4426950408889634


class VocabShard(NamedTuple):
    """A rank's columns of the logits, and the reductions over ranks (in place or not)."""

    start: int  # the first token of this rank
    total: int  # tokens of all ranks
    all_max: Callable[[Tensor], Tensor]
    all_sum: Callable[[Tensor], Tensor]


class Losses(NamedTuple):
    loss_T: Tensor  # float32; 0 where the target is ignored
    lse_T: Tensor  # float32, natural logarithm


class Rule(NamedTuple):
    """Options of the loss."""

    ignore_index: int = -100
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    shard: VocabShard | None = None

    def uniform(self, columns: int) -> float:
        """The share of label smoothing that each token gets."""
        return self.label_smoothing / (columns if self.shard is None else self.shard.total)


def cross_entropy_reference(
    logits_TV: Tensor, targets_T: Tensor, rule: Rule | None = None
) -> Losses:
    """Reference in float32 (float64 for float64 logits); autograd gives its gradient."""
    rule = rule or Rule()
    wide = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    counts_T = targets_T != rule.ignore_index
    if not targets_T.is_cuda and targets_T.numel():  # there a look would wait for the GPU
        least, most = targets_T.where(counts_T, 0).aminmax()
        columns = wide.shape[1] if rule.shard is None else rule.shard.total
        wanted = f"{rule.ignore_index} or tokens from 0 to {columns - 1}"
        found = f"{int(least)} to {int(most)}"
        require(bool(least >= 0 and most < columns), "targets_T", wanted, found)
    if rule.shard is not None:
        return Losses(*_Sharded.apply(wide, targets_T, rule, rule.shard))
    chosen_T = wide.gather(1, targets_T.where(counts_T, 0)[:, None])[:, 0]
    lse_T = wide.logsumexp(dim=1)
    smooth = rule.label_smoothing
    loss_T = lse_T - (1 - smooth) * chosen_T + rule.z_loss * lse_T.square()
    if smooth:
        loss_T = loss_T - smooth * wide.mean(dim=1)
    return Losses(loss_T.where(counts_T, 0.0), lse_T.where(counts_T, 0.0))


class _Sharded(torch.autograd.Function):
    """Loss of a vocabulary shard: forward reduces over ranks, backward needs no communication."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, rule: Rule, shard: VocabShard
    ) -> tuple[Tensor, Tensor]:
        scaled_TV = logits_TV * LOG2E
        top_T = scaled_TV.amax(1)
        total_T = torch.exp2(scaled_TV - top_T.where(top_T.isfinite(), 0.0)[:, None]).sum(1)
        mass_T = scaled_TV.sum(1) if rule.label_smoothing else torch.zeros_like(top_T)
        local_T = targets_T.long() - shard.start
        here_T = (local_T >= 0) & (local_T < logits_TV.shape[1]) & (targets_T != rule.ignore_index)
        local_T = local_T.where(here_T, 0)
        chosen_T = scaled_TV.gather(1, local_T[:, None])[:, 0].where(here_T, 0.0)
        losses = join(torch.stack((top_T, total_T, chosen_T, mass_T)), targets_T, rule, shard)
        ctx.save_for_backward(logits_TV, targets_T, losses.lse_T, local_T, here_T)
        ctx.rule = rule
        return losses.loss_T, losses.lse_T

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, of_loss_T: Tensor, of_lse_T: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits_TV, targets_T, lse_T, local_T, here_T = ctx.saved_tensors
        rule: Rule = ctx.rule
        counts_T = targets_T != rule.ignore_index
        of_loss_T, of_lse_T = of_loss_T.where(counts_T, 0.0), of_lse_T.where(counts_T, 0.0)
        weight_T = of_loss_T * (1 + 2 * rule.z_loss * lse_T) + of_lse_T
        grad_TV = (logits_TV - lse_T[:, None]).exp() * weight_T[:, None]
        grad_TV -= (rule.uniform(1) * of_loss_T)[:, None]
        target_T = (1 - rule.label_smoothing) * here_T * of_loss_T
        grad_TV.scatter_add_(1, local_T[:, None], -target_T[:, None])
        return grad_TV, None, None, None


def join(statistics_4T: Tensor, targets_T: Tensor, rule: Rule, shard: VocabShard) -> Losses:
    """The ranks' maxima, sums, target logits and sums of logits (all times log2(e)) become loss and lse."""
    top_T, rest_3T = statistics_4T[0], statistics_4T[1:]
    highest_T = shard.all_max(top_T.clone())
    base_T = highest_T.where(highest_T.isfinite(), 0.0)
    rest_3T[0] *= torch.exp2(top_T - base_T)
    total_T, chosen_T, mass_T = shard.all_sum(rest_3T)
    counts_T = targets_T != rule.ignore_index
    log_T = (highest_T + total_T.log2()).where(counts_T, 0.0)
    loss_T = log_T - (1 - rule.label_smoothing) * chosen_T - rule.uniform(1) * mass_T
    lse_T = log_T / LOG2E
    return Losses((loss_T / LOG2E + rule.z_loss * lse_T.square()).where(counts_T, 0.0), lse_T)


def check_rule(logits: Tensor, targets: Tensor, rule: Rule) -> None:
    """A ValueError where these are not logits, not targets, or not a rule."""
    check("logits_TV", logits, dtypes=(*FLOATS, torch.float64), shape=(None, None))
    require(logits.shape[1] > 0, "logits_TV", "at least one column", list(logits.shape))
    side_by_side = logits.stride(1) == 1 or logits.shape[1] == 1
    require(side_by_side, "logits_TV", "stride 1 in the last dimension", logits.stride())
    check("targets_T", targets, dtypes=INTEGERS, shape=logits.shape[:1], beside=logits, packed=True)
    require(rule.z_loss >= 0, "z_loss", "a weight of 0 or more", rule.z_loss)
    smooth = rule.label_smoothing
    require(0 <= smooth < 1, "label_smoothing", "a share of 0 to less than 1", smooth)
