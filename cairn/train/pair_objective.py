"""The loss of preferences over a packed batch: a rule over sums of sequences, in two passes over the head.

    hidden -log-probabilities, no gradient-> sums of each answer -rule-> slope of each sequence
    hidden -head again, with that slope for every token-> gradients

A sample has two answers, whose tokens the stream `side` tells apart (`data.preferences`); all samples of a microbatch
have equally many tokens. `reference`, where a rule needs it, holds log-probabilities of another model. Only targets of
the answers count. Context parallelism cuts sequences apart and is refused by who sets this up.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cairn.models.linear.maps import Vocabulary
from cairn.models.spec import ModelSpec
from cairn.train.data.preferences import GOOD, MARGIN, SIDE
from cairn.train.heads import TargetLogProbs
from cairn.train.objective import IGNORED, Objective, Streams
from cairn.train.rules.kto import KTO, divergence
from cairn.train.rules.pairs import Completions, PairLoss, PairRule
from cairn.train.rules.reward import Reward, reward_loss

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

REFERENCE, LOSS, SLOPE = "reference", "pair loss", "pair slope"


class PairObjective:
    """The `Loss` of a training step over preferences; its unit is a sample, not a token."""

    def __init__(self, spec: ModelSpec, rule: PairRule | KTO, fused: bool = False) -> None:
        self.rule = rule
        self.head = TargetLogProbs(spec, fused=fused)
        self.tokens = Objective(spec, GivenSlope(), fused)
        # Of each sample since `metrics`: the rewards of both answers; of KTO, a reward and whether the answer is good.
        self._rewards: list[tuple[Tensor, Tensor]] = []

    def units(self, batches: "Sequence[Batch]") -> int:
        """Divisor of the loss on this data rank."""
        return sum(len(batch.ids) for batch in batches)

    def __call__(
        self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: "Batch", valid: Tensor
    ) -> Tensor:
        with torch.no_grad():
            logp_T = self.head(hidden_TD.detach(), vocabulary, batch)["logp"]
        sides = answers(logp_T, batch, self.rule.needs_reference)
        pair_loss = judged(self.rule, sides, batch)
        chosen_P, rejected_P = (side.reward_P(self.rule.per_token) for side in sides)
        single = isinstance(self.rule, KTO)
        self._rewards.append((chosen_P, _of_samples(batch, GOOD) if single else rejected_P))
        loss_T, slope_T = spread(pair_loss, sides, batch)
        streams = batch.extra | {LOSS: loss_T, SLOPE: slope_T}
        return self.tokens(hidden_TD, vocabulary, batch._replace(extra=streams), valid)

    def metrics(self) -> dict[str, float]:
        """Since they were read last, on this rank."""
        seen, self._rewards = self._rewards, []
        if not seen:
            return {}
        first_P, second_P = (torch.cat(rewards) for rewards in zip(*seen, strict=True))
        if isinstance(self.rule, KTO):
            return margin(first_P, second_P > 0.5)
        return {"preferred": float((first_P > second_P).float().mean())}


class GivenSlope:
    """Losses and slopes that are known already."""

    z_loss = 0.0
    is_cross_entropy = False

    def __call__(self, logp_T: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        return streams[LOSS], streams[SLOPE]


def answers(logp_T: Tensor, batch: "Batch", with_reference: bool) -> list[Completions]:
    """The two answers of each sample, summed over their tokens."""
    at_T, samples = _places(batch), len(batch.ids)
    counts_T = batch.targets_T != IGNORED
    reference_T = batch.extra[REFERENCE] if with_reference else torch.zeros_like(logp_T)

    def sums(values_T: Tensor) -> Tensor:
        total_S = torch.zeros(2 * samples + 1, dtype=torch.float32, device=logp_T.device)
        kept_T = torch.where(counts_T, values_T.float(), 0.0)
        return total_S.index_add(0, at_T, kept_T)[:-1].view(samples, 2)

    tokens_P2 = sums(torch.ones_like(logp_T)).clamp(min=1)
    logp_P2, reference_P2 = sums(logp_T), sums(reference_T)
    return [Completions(logp_P2[:, i], tokens_P2[:, i], reference_P2[:, i]) for i in (0, 1)]


def judged(rule: PairRule | KTO, sides: list[Completions], batch: "Batch") -> PairLoss:
    """KTO compares the first answers with how likely the second ones became, which are other prompts' answers."""
    if isinstance(rule, Reward) and MARGIN in batch.extra:
        chosen, rejected = sides
        margin_P = _of_samples(batch, MARGIN)
        return reward_loss(chosen.logp_P, rejected.logp_P, margin_P, rule.center)
    if not isinstance(rule, KTO):
        return rule(*sides)
    good_P = _of_samples(batch, GOOD) > 0.5
    pair_loss = rule(sides[0].gain_P, good_P, divergence(sides[1].gain_P))
    return PairLoss(pair_loss.loss_S, pair_loss.slope_S, torch.zeros_like(pair_loss.slope_S))


def margin(reward_S: Tensor, good_S: Tensor) -> dict[str, float]:
    """Reward margin between good and bad answers; empty if there are only good or only bad ones."""
    if good_S.all() or not good_S.any():
        return {}
    return {"margin": float(reward_S[good_S].mean() - reward_S[~good_S].mean())}


def _of_samples(batch: "Batch", stream: str) -> Tensor:
    """A stream that has one value for all tokens of a sample."""
    return batch.extra[stream].view(len(batch.ids), -1)[:, 0]


def spread(pair_loss: PairLoss, sides: list[Completions], batch: "Batch") -> tuple[Tensor, Tensor]:
    """Each token's share of its sample's loss, which the first answer bears, and its slope."""
    slope_S = torch.stack([pair_loss.chosen_P, pair_loss.rejected_P], 1).flatten()
    share_P = pair_loss.loss_P / sides[0].tokens_P
    loss_S = torch.stack([share_P, torch.zeros_like(share_P)], 1).flatten()
    last, at_T = slope_S.new_zeros(1), _places(batch)  # the last one is that of padding
    return torch.cat([loss_S, last])[at_T], torch.cat([slope_S, last])[at_T]


def _places(batch: "Batch") -> Tensor:
    """Answer index of each token: 2 p and 2 p + 1 for sample p, and the last index for padding."""
    samples, tokens = len(batch.ids), len(batch.tokens_T)
    side_T = batch.extra[SIDE].long()
    sample_T = torch.arange(tokens, device=side_T.device) // (tokens // samples)
    return torch.where(side_T < 2, 2 * sample_T + side_T, 2 * samples)
