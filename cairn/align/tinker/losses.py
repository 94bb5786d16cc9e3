"""Tinker's losses by name: each a rule over a token's log-probability, summed over all tokens.

    cross_entropy         -w logp
    importance_sampling   -r A                                      r = exp(logp - logprobs)
    ppo                   -min(r A, clip(r, low, high) A)           0.8, 1.2
    cispo                 -stop_gradient(clip(r, low, high)) A logp 0.8, 1.2
    dro                   -(A logp - beta/2 (logp - logprobs)^2)    0.05

A rule keeps the log-probabilities that it was given: they are the answer to a pass.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.core.errors import RequestError, did_you_mean
from cairn.train.objective import Streams
from cairn.train.rules.policy import Clip, clipped, ratio

AT = "at"  # the stream that says which token of the pass each one is
TokenLoss = Callable[[Tensor, Streams, Mapping[str, float]], tuple[Tensor, Tensor]]


class LossKind(NamedTuple):
    inputs: tuple[str, ...]  # tensors that a datum has to bring
    settings: dict[str, float]  # with their defaults
    loss: TokenLoss


def _cross_entropy(logp_T: Tensor, streams: Streams, _: Mapping[str, float]) -> tuple:
    weights_T = streams["weights"]
    return -weights_T * logp_T, -weights_T


def _importance(logp_T: Tensor, streams: Streams, _: Mapping[str, float]) -> tuple:
    loss_T = -ratio(logp_T, streams["logprobs"]) * streams["advantages"]
    return loss_T, loss_T


def _ppo(logp_T: Tensor, streams: Streams, settings: Mapping[str, float]) -> tuple:
    clip = Clip(1 - settings["clip_low_threshold"], settings["clip_high_threshold"] - 1)
    return clipped(logp_T, streams["logprobs"], streams["advantages"], clip)


def _cispo(logp_T: Tensor, streams: Streams, settings: Mapping[str, float]) -> tuple:
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    slope_T = -ratio(logp_T, streams["logprobs"]).clamp(low, high) * streams["advantages"]
    return slope_T * logp_T, slope_T


def _dro(logp_T: Tensor, streams: Streams, settings: Mapping[str, float]) -> tuple:
    apart_T, advantage_T = logp_T - streams["logprobs"], streams["advantages"]
    beta = settings["beta"]
    loss_T = -(advantage_T * logp_T - 0.5 * beta * apart_T.square())
    return loss_T, -(advantage_T - beta * apart_T)


SAMPLED = ("target_tokens", "logprobs", "advantages")
THRESHOLDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": LossKind(("target_tokens", "weights"), {}, _cross_entropy),
    "importance_sampling": LossKind(SAMPLED, {}, _importance),
    "ppo": LossKind(SAMPLED, THRESHOLDS, _ppo),
    "cispo": LossKind(SAMPLED, THRESHOLDS, _cispo),
    "dro": LossKind(SAMPLED, {"beta": 0.05}, _dro),
}


class TinkerRule:
    """A loss by its name, which remembers the log-probability of every token of the pass."""

    z_loss = 0.0
    is_cross_entropy = False

    def __init__(self, name: str, settings: Mapping[str, float], tokens: int) -> None:
        self.kind = loss_kind(name)
        self.settings = {**self.kind.settings, **settings}
        unknown = sorted(self.settings.keys() - self.kind.settings.keys())
        if unknown:
            known = ", ".join(self.kind.settings) or "none"
            raise RequestError(
                f"the loss {name} has no setting {unknown[0]!r}", hint=f"there are: {known}"
            )
        self.logp_T = torch.zeros(tokens)

    def __call__(self, logp_T: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        at_T = streams[AT]
        real_T = at_T >= 0  # padding has no place
        self.logp_T[at_T[real_T].cpu()] = logp_T.detach()[real_T].float().cpu()
        return self.kind.loss(logp_T.float(), streams, self.settings)


def loss_kind(name: str) -> LossKind:
    if name not in LOSSES:
        hint = did_you_mean(name, LOSSES, otherwise=f"there are: {', '.join(LOSSES)}")
        raise RequestError(f"no loss is called {name!r}", hint=hint)
    return LOSSES[name]
