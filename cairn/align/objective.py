"""The loss of a policy over rollouts: a rule of `train.rules` over each token, or for GSPO over each answer.

    old      the engine's log-probability of a sampled token; NaN: a right answer to imitate, whose ratio is 1

Beside the loss it measures, on the first step after each round of rollouts, how far the trainer's log-probabilities are
from the engine's under the same weights: the mismatch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.align.config import Align
from cairn.align.consistent import NOW
from cairn.align.value_head import RETURN, ValueHead
from cairn.models.linear.maps import Vocabulary
from cairn.models.spec import ModelSpec
from cairn.train.data.batch import IGNORED, Batch
from cairn.train.heads import TargetLogProbs
from cairn.train.objective import Objective, Rule, Streams
from cairn.train.pair_objective import LOSS, REFERENCE, SLOPE, GivenSlope
from cairn.train.rules.cispo import CISPO
from cairn.train.rules.gspo import GSPO
from cairn.train.rules.kl import divergence
from cairn.train.rules.policy import Clip, PolicyGradient


class PolicyObjective:
    """The `Loss` of a step; its unit is an answer."""

    def __init__(
        self,
        spec: ModelSpec,
        config: Align,
        fused: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        low, high = config.clip
        self.kind, self.kl = config.algorithm.kind, config.algorithm.kl
        clip = Clip(low, high)
        self.watch = Mismatch()
        rule: Rule = PolicyGradient(clip, self.kl)
        if self.kind == "cispo":
            rule = CISPO(1 + high, self.kl)
        self.tokens = Objective(spec, Watched(rule, self.watch), fused)
        self.gspo = GSPO(clip)
        ppo = self.kind == "ppo"
        self.value = ValueHead(spec.hidden, config.algorithm, device) if ppo else None
        self.head = TargetLogProbs(spec, fused=fused)
        self.given = Objective(spec, GivenSlope(), fused)

    def units(self, batches: Sequence[Batch]) -> int:
        return sum(len(batch.ids) for batch in batches)

    def __call__(
        self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: Batch, valid: Tensor
    ) -> Tensor:
        if self.kind == "gspo":
            return self._of_answers(hidden_TD, vocabulary, batch, valid)
        if NOW in batch.extra:
            loss_T, slope_T = self.tokens.rule(batch.extra[NOW], batch.extra)
            streams = batch.extra | {LOSS: loss_T, SLOPE: slope_T}
            loss = self.given(hidden_TD, vocabulary, batch._replace(extra=streams), valid)
        else:
            loss = self.tokens(hidden_TD, vocabulary, batch, valid)
        if self.value is not None and RETURN in batch.extra:  # not while it warms up
            loss = loss + self.value.loss(hidden_TD, vocabulary, batch) / valid
        return loss

    def _of_answers(
        self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: Batch, valid: Tensor
    ) -> Tensor:
        """GSPO loss, whose ratio needs all tokens of an answer."""
        logp_T = batch.extra.get(NOW)
        if logp_T is None:
            with torch.no_grad():
                logp_T = self.head(hidden_TD.detach(), vocabulary, batch)["logp"]
        streams = batch.extra | gspo_streams(self.gspo, logp_T, batch, self.watch, self.kl)
        return self.given(hidden_TD, vocabulary, batch._replace(extra=streams), valid)


class Mismatch:
    """Between trainer and engine, |difference of log-probabilities| of the tokens seen since it was read."""

    def __init__(self) -> None:
        self.on, self.total, self.count, self.largest = False, 0.0, 0, 0.0

    def note(self, logp_T: Tensor, old_T: Tensor, counts_T: Tensor) -> None:
        if self.on and bool(counts_T.any()):
            apart_T = (logp_T - old_T).abs()[counts_T]
            self.total += float(apart_T.sum())
            self.count += len(apart_T)
            self.largest = max(self.largest, float(apart_T.max()))

    def read(self) -> tuple[float | None, float | None]:
        """Mean and largest; None where no token was seen."""
        mismatch = (self.total / self.count, self.largest) if self.count else (None, None)
        self.total, self.count, self.largest = 0.0, 0, 0.0
        return mismatch


class Watched:
    """A rule whose inputs are measured."""

    is_cross_entropy = False
    z_loss = 0.0

    def __init__(self, rule: Rule, watch: Mismatch) -> None:
        self.rule, self.watch = rule, watch

    def __call__(self, logp_T: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        old_T = streams["old"]
        self.watch.note(logp_T, old_T, (streams["weight"] > 0) & ~old_T.isnan())
        anchored = {**streams, "old": torch.where(old_T.isnan(), logp_T, old_T)}
        loss_T, slope_T = self.rule(logp_T, anchored)
        return imitation(loss_T, logp_T, streams, streams["weight"]), slope_T


def imitation(loss_T: Tensor, logp_T: Tensor, streams: Streams, weight_T: Tensor) -> Tensor:
    """The cross entropy of tokens that were not sampled (`old` is NaN), in place of what a rule says of them.

    Their ratio is that of the policy to itself, so a rule's loss is the same number in every step; the slope is the
    one of cross entropy already.
    """
    entropy_T = -weight_T * streams["advantage"] * logp_T
    return torch.where(streams["old"].isnan(), entropy_T, loss_T)


def gspo_streams(
    rule: GSPO, logp_T: Tensor, batch: Batch, watch: Mismatch, kl: float = 0.0
) -> dict[str, Tensor]:
    """Loss and slope of each token, from one ratio for each answer.

    `kl`: weight of the divergence from the reference. `weight` of a token is the answer's weight over its tokens.
    """
    counts_T = batch.targets_T != IGNORED
    old_T = torch.where(batch.extra["old"].isnan(), logp_T, batch.extra["old"])
    watch.note(logp_T, old_T, counts_T & ~batch.extra["old"].isnan())
    lengths = torch.tensor(batch.lengths, device=logp_T.device)
    at_T = torch.arange(len(lengths), device=logp_T.device).repeat_interleave(lengths)

    def sums(values_T: Tensor) -> Tensor:
        kept_T = torch.where(counts_T, values_T.float(), 0.0)
        return torch.zeros(len(lengths), device=logp_T.device).index_add(0, at_T, kept_T)

    tokens_S = sums(torch.ones_like(logp_T)).clamp(min=1)
    advantage_S = sums(batch.extra["advantage"]) / tokens_S
    loss_S, slope_S = rule(sums(logp_T), sums(old_T), tokens_S, advantage_S)
    weight_T = batch.extra["weight"]
    loss_T, slope_T = loss_S[at_T] * weight_T, (slope_S * tokens_S)[at_T] * weight_T
    loss_T = imitation(loss_T, logp_T, batch.extra, weight_T)
    if kl:
        value_T, pull_T = divergence(logp_T, batch.extra[REFERENCE], "k3")
        loss_T, slope_T = loss_T + kl * weight_T * value_T, slope_T + kl * weight_T * pull_T
    return {LOSS: loss_T, SLOPE: slope_T}
