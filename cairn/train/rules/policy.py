"""Policy gradients with a ratio to the policy that sampled: PPO's clipped loss, and all who share it.

    r = exp(logp - old)      loss = -min(r A, clip(r, 1 - low, 1 + high) A)      + kl * divergence from the reference

GRPO, RLOO, Dr. GRPO and DAPO are this rule with other advantages (`advantages`) and another divisor (`weigh`); GSPO has
one ratio for a sequence (`gspo`), CISPO none under the gradient (`cispo`). Streams: `advantage`, `old`, and where they
are used `reference`, `behaviour` (of the engine that sampled, for truncated importance sampling) and `weight`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cairn.train.objective import Streams
from cairn.train.rules.kl import LARGEST, Estimator, divergence


class Clip(NamedTuple):
    low: float = 0.2
    high: float = 0.2  # DAPO: 0.28 (arXiv:2503.14476)
    dual: float = 0.0  # for A < 0 the loss is at most dual * -A (arXiv:1912.09729); 0: no bound


class PolicyGradient:
    """PPO's loss of each token."""

    z_loss = 0.0
    is_cross_entropy = False

    def __init__(
        self,
        clip: Clip = Clip(),  # noqa: B008 (immutable)
        kl: float = 0.0,
        estimator: Estimator = "k3",
        truncate: float = 0.0,
    ) -> None:
        """`truncate`: largest weight old / behaviour by which a token counts (TIS); 0: all count 1."""
        self.clip, self.kl, self.estimator, self.truncate = clip, kl, estimator, truncate

    def __call__(self, logp_T: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        loss_T, slope_T = clipped(logp_T, streams["old"], streams["advantage"], self.clip)
        if self.truncate:
            weight_T = importance(streams["old"], streams["behaviour"], self.truncate)
            loss_T, slope_T = weight_T * loss_T, weight_T * slope_T
        return with_extras(loss_T, slope_T, logp_T, streams, self.kl, self.estimator)


def with_extras(
    loss_T: Tensor,
    slope_T: Tensor,
    logp_T: Tensor,
    streams: Streams,
    kl: float,
    estimator: Estimator,
) -> tuple[Tensor, Tensor]:
    """The divergence from the reference beside the loss, and each token's weight in the mean."""
    if kl:
        value_T, pull_T = divergence(logp_T, streams["reference"], estimator)
        loss_T, slope_T = loss_T + kl * value_T, slope_T + kl * pull_T
    if "weight" in streams:
        loss_T, slope_T = loss_T * streams["weight"], slope_T * streams["weight"]
    return loss_T, slope_T


def ratio(logp_T: Tensor, old_T: Tensor) -> Tensor:
    return (logp_T.float() - old_T).clamp(-LARGEST, LARGEST).exp()


def clipped(
    logp_T: Tensor, old_T: Tensor, advantage_T: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """The pessimistic one of two losses; where the clipped one is larger, nothing pushes."""
    r_T = ratio(logp_T, old_T)
    free_T, bound_T = -r_T * advantage_T, -r_T.clamp(1 - clip.low, 1 + clip.high) * advantage_T
    pushes_T = free_T >= bound_T
    loss_T = torch.maximum(free_T, bound_T)
    if clip.dual:
        most_T = -clip.dual * advantage_T
        over_T = (advantage_T < 0) & (loss_T > most_T)
        loss_T, pushes_T = torch.where(over_T, most_T, loss_T), pushes_T & ~over_T
    return loss_T, free_T * pushes_T


def importance(old_T: Tensor, behaviour_T: Tensor, largest: float) -> Tensor:
    """Truncated weight of the trainer's policy over the engine's."""
    return ratio(old_T, behaviour_T).clamp(max=largest)


def weigh(kind: str, tokens_S: Tensor, longest: int) -> Tensor:
    """The weight of each sequence's tokens, for a sum that is divided by all sequences.

    `sequence`: mean of the sequences' means (GRPO); `token`: mean over all tokens (DAPO, CISPO); `constant`: divided by
    the longest length allowed (Dr. GRPO, arXiv:2503.20783).
    """
    if kind == "sequence":
        return 1 / tokens_S.clamp(min=1)
    if kind == "token":
        total = tokens_S.sum().clamp(min=1)
        return torch.full_like(tokens_S, len(tokens_S), dtype=torch.float32) / total
    return torch.full_like(tokens_S, 1 / longest, dtype=torch.float32)
