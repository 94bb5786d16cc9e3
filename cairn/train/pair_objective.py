"""The loss of preference pairs over a packed batch: a rule over sums of sequences, in two passes over the head.

    hidden -log-probabilities, no gradient-> sums of each completion -rule-> slope of each sequence
    hidden -head again, with that slope for every token-> gradients

Documents 2p and 2p + 1 of a batch are the chosen and the rejected answer of pair p: the stream `sequence` numbers the
tokens' documents from 0 in each microbatch, and `reference`, where a rule needs it, holds log-probabilities of the
base. Only targets of the completion count. Context parallelism cuts sequences apart and is refused by who sets this up.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cairn.models.linear.maps import Vocabulary
from cairn.models.spec import ModelSpec
from cairn.train.heads import TargetLogProbs
from cairn.train.objective import IGNORED, Objective, Streams
from cairn.train.rules.pairs import Completions, PairLoss, PairRule

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

SEQUENCE, REFERENCE, LOSS, SLOPE = "sequence", "reference", "pair loss", "pair slope"


class PairObjective:
    """The `Loss` of a training step over pairs; `valid` is the number of pairs of all ranks."""

    def __init__(self, spec: ModelSpec, rule: PairRule, fused: bool = False) -> None:
        self.rule = rule
        self.head = TargetLogProbs(spec, fused=fused)
        self.tokens = Objective(spec, GivenSlope(), fused)

    def __call__(
        self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: "Batch", valid: Tensor
    ) -> Tensor:
        with torch.no_grad():
            logp_T = self.head(hidden_TD.detach(), vocabulary, batch)["logp"]
        loss_T, slope_T = pair_slopes(self.rule, logp_T, batch)
        streams = batch.extra | {LOSS: loss_T, SLOPE: slope_T}
        return self.tokens(hidden_TD, vocabulary, batch._replace(extra=streams), valid)


class GivenSlope:
    """Losses and slopes that are known already."""

    z_loss = 0.0
    is_cross_entropy = False

    def __call__(self, logp_T: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        return streams[LOSS], streams[SLOPE]


def pair_slopes(rule: PairRule, logp_T: Tensor, batch: "Batch") -> tuple[Tensor, Tensor]:
    """Each token's share of its pair's loss, and its slope."""
    counts_T = batch.targets_T != IGNORED
    pairs, sequence_T = len(batch.lengths) // 2, batch.extra[SEQUENCE].long()
    reference_T = batch.extra[REFERENCE] if rule.needs_reference else torch.zeros_like(logp_T)

    def sums(values_T: Tensor) -> Tensor:
        total_S = torch.zeros(2 * pairs + 1, dtype=torch.float32, device=logp_T.device)
        kept_T = torch.where(counts_T, values_T.float(), 0.0)
        return total_S.index_add(0, sequence_T.clamp(max=2 * pairs), kept_T)[: 2 * pairs]

    tokens_P2 = sums(torch.ones_like(logp_T)).clamp(min=1).view(-1, 2)
    logp_P2, reference_P2 = sums(logp_T).view(-1, 2), sums(reference_T).view(-1, 2)
    sides = [Completions(logp_P2[:, i], tokens_P2[:, i], reference_P2[:, i]) for i in (0, 1)]
    found: PairLoss = rule(*sides)
    there_P = sums(torch.ones_like(logp_T)).view(-1, 2).amin(1) > 0  # padding makes no pair
    slope_S = (torch.stack(found[1:], 1) * there_P[:, None]).flatten()
    loss_S = (0.5 * (found.loss_P * there_P)[:, None] / tokens_P2).flatten()
    last = slope_S.new_zeros(1)  # of padding
    at_T = sequence_T.clamp(max=2 * pairs)
    return torch.cat([loss_S, last])[at_T], torch.cat([slope_S, last])[at_T]


def numbered(lengths: list[int]) -> Tensor:
    """The stream `sequence`: which document each token belongs to."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
